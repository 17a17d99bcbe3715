"""`validate --report`: one page that needs no network, shows what was found, and runs nothing a model said."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.errors import DiskFullError
from gemma_neuron.render.page import page, write_page
from gemma_neuron.reports import Figure, LevelResult, ValidationReport
from tests.browser import browser, missing
from tests.cli_process import run_main

HOSTILE = '</span><script>document.title = "owned"</script>\x1b[31m\u202e{{ 7 * 7 }}'


def level(number: int, name: Any, status: Any, reason: str, **more: Any) -> LevelResult:
    return LevelResult(level=number, name=name, status=status, reason=reason, **more)


def answer(name: str, text: str, right: bool) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "fact",
        "asked": [{"role": "user", "content": f"Who is {name}?"}],
        "expected": ("Paris",),
        "right": right,
        "ended": right,
        "problems": (),
        "text": text,
    }


@pytest.fixture(scope="module")
def report() -> ValidationReport:
    """A port that differs: every part of the page has something to show."""
    distance = [1e-3 * (1 + math.sin(i)) for i in range(90)]
    text = {"relative": distance, "flips": [{"position": 40, "margin": 0.02}]}
    parting = {
        "prompt": "a", "position": 12, "step": 2, "before": "<|turn>user", "port_text": HOSTILE,
        "reference_text": " the", "margin": 0.4, "noise": False, "port_token": 3, "reference_token": 4,
    }  # fmt: skip
    tolerance = {"relative": 0.01, "margin": 0.1, "source": "noise"}
    figure = Figure(name="KL, nats", value=0.31, bar=0.05)
    return ValidationReport(
        verdict="differs",
        scope="chat",
        levels=(
            level(0, "prompt", "pass", "2 prompts lint clean"),
            level(1, "weights", "pass", "equal"),
            level(2, "reference", "pass", "fine", detail={"answers": [answer("a", "Paris", True)]}),
            level(
                3, "logits", "fail", "long: position 40: 0.31 nats of KL (bar 0.05)", figures=(figure,),
                detail={"by_position": {"long": text}, "tolerance": tolerance},
            ),
            level(
                4, "position", "pass", "9 cases",
                detail={"by_position": [{"case": "c", "position": 5, "relative": 0.0}]},
            ),
            level(5, "generation", "fail", "a: parts", detail={"divergences": [parting], "margin_bar": 0.1}),
            level(6, "chat", "fail", "0 of 1 right", detail={"answers": [answer("a", HOSTILE, False)]}),
        ),
        token_match={"compared": 40, "equal": 12},
        first_divergence=None,
        warnings=("all layer_scalar are 1", HOSTILE),
        provenance={
            "port": {"source": "model", "window": 16, "tp": 8, "versions": {"torch": "2.13.0"}},
            "golden": {"digest": "0123abcd", "noise": None},
        },
        drift={
            "summary": "layer 1 is the first that parts",
            "first": {"layer": 1, "kind": "global", "position": 7, "token_text": HOSTILE},
            "layers": [
                {"layer": i, "kind": kind, "largest": 10.0 ** (i - 3), "bar": 0.02}
                for i, kind in enumerate(("sliding", "global"))
            ],
        },
    )  # fmt: skip


def test_the_first_words_are_the_verdict(report: ValidationReport) -> None:
    html = page(report)
    body = html[html.index("<body>") :]
    assert body.index("differs") < body.index("level 3 (logits)") < body.index("0123abcd")
    assert "layer 1 (global) parts first, at position 7" in body
    assert "bar ≤ 0.05" in body and "0.31" in body and "all layer_scalar are 1" in body
    assert body.count("<svg ") == 3


def test_what_a_model_said_is_text(report: ValidationReport) -> None:
    html = page(report)
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "\x1b" not in html and "\\x1b[31m\\u202e" in html
    assert "{{ 7 * 7 }}" in html


def test_a_base_model_and_a_run_that_looked_at_nothing(report: ValidationReport) -> None:
    left = tuple(replace(item, status="not-run", detail={}, figures=()) for item in report.levels)
    html = page(replace(report, verdict="insufficient", levels=left, drift=None, scope="base"))
    assert "<svg " not in html
    assert "levels 2 and 6 were not run" in html and "Levels 3 and 4 were not run." in html


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_in_a_browser(report: ValidationReport, tmp_path: Path) -> None:
    """From the file, as somebody gets it by mail: no error, no other request, nothing wider than a phone."""
    file = tmp_path / "report.html"
    write_page(report, file)
    with browser(tmp_path / "profile") as opened:
        opened.open(file.as_uri())
        assert opened.run("return document.title").startswith("differs")
        assert opened.run("return document.querySelector('h1').textContent") == "differs"
        ids = "return [...document.querySelectorAll('[id]')].map(e => e.id)"
        assert len(opened.run(ids)) == len(set(opened.run(ids)))
        assert opened.run("return document.querySelectorAll('svg text').length") > 20
        for width in (360, 1200):
            opened.resize(width, 800)
            assert opened.run("return document.documentElement.scrollWidth") <= width
        ink = "return getComputedStyle(document.querySelector('svg text')).fill"
        light = opened.run(ink)
        opened.dark(True)
        assert opened.run(ink) != light
        assert opened.console() == []
        assert opened.requests() == [file.as_uri()]


def test_without_matplotlib_nothing_is_begun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of it then finds
    ended = run_main(capsys, "validate", tmp_path / "port", "--report", tmp_path / "r.html")
    assert ended.code == 8
    assert "matplotlib" in ended.err and "pip install 'gemma-neuron[report]'" in ended.err


@pytest.mark.parametrize("name", ["none/report.html", ".", "/proc/report.html"])
def test_a_place_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    ended = run_main(capsys, "validate", tmp_path / "port", "--report", tmp_path / name)
    assert (
        ended.code == 2
        and "--report" in ended.err
        and "be written" in ended.err
        and "hint: " in ended.err
    )


def test_a_page_that_cannot_be_written_does_not_lose_the_verdict(
    report: ValidationReport, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills while the port is judged: minutes of work are shown all the same."""
    monkeypatch.setattr("gemma_neuron.pipeline.validate_port", lambda *_, **__: report)

    def full(path: Path, data: bytes) -> None:
        raise DiskFullError(f"Writing {path} failed", "Free some room.")

    monkeypatch.setattr("gemma_neuron.artifacts.write_atomic", full)
    ended = run_main(capsys, "validate", tmp_path, "--report", tmp_path / "page.html", "--json")
    assert ended.code == 8 and "page.html failed" in ended.err
    assert json.loads(ended.out)["verdict"] == "differs"
