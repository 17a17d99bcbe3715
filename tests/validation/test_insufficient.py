"""`validate` as it is typed: a port that is right, and that nobody looked at closely enough, does not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma_neuron import pipeline
from gemma_neuron.demo import demo_folder
from gemma_neuron.port import Port
from scripts.mutants.settings import fewer_questions
from tests.cli_process import run_main
from tests.eager import EagerRunner, eager_port


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    """The bundled model, its graphs uncompiled; no bucket holds the window of 32."""
    monkeypatch.setattr(pipeline, "runner_factory", lambda port: lambda: EagerRunner(port))
    return eager_port(
        demo_folder(), tmp_path / "port", tp=1, slots=2, max_context=144, buckets=(16,)
    )


def test_a_short_bucket_and_a_level_left_out(
    port: Port, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = fewer_questions(demo_folder(), 8, tmp_path / "questions.toml")
    asked = ("validate", port.path, "--questions", questions, "--json")
    done = run_main(capsys, *asked)
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (7, "insufficient"), report
    statuses = [level["status"] for level in report["levels"]]
    assert statuses == ["pass"] * 4 + ["not-run"] + ["pass"] * 2
    reason = report["levels"][4]["reason"]
    assert reason == "the longest prefill bucket (16) is shorter than the window (32)"

    done = run_main(capsys, *asked, "--levels", "0-3")
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (7, "insufficient")
    assert [level["status"] for level in report["levels"]][4:] == ["not-run"] * 3
    assert report["levels"][5]["reason"] == "left out by --levels"


def test_a_set_without_questions_for_base_judges_nothing(
    port: Port, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled set has conversations only: with --base nobody is asked anything, which is no fault of the prompt."""
    done = run_main(capsys, "validate", port.path, "--base", "--levels", "0-3,5-6", "--json")
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (7, "insufficient"), report
    assert (report["scope"], report["provenance"]["base_asked"]) == ("base", True)
    for number in (0, 2):
        assert report["levels"][number]["status"] == "not-run"
        assert "has no question for scope base" in report["levels"][number]["reason"]
    assert "--base" in report["levels"][6]["reason"]


@pytest.mark.parametrize(
    ("option", "code"), [("--golden", 8), ("--questions", 2), ("--chat-template", 2)]
)
def test_a_file_that_is_not_there_is_said_before_the_port_is_loaded(
    port: Port, option: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loaded: list[Port] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "runner_factory", lambda port: lambda: loaded.append(port))
        done = run_main(capsys, "validate", port.path, option, tmp_path / "none")
    assert done.code == code and str(tmp_path / "none") in done.err and not loaded
