"""What the page's template prints, taken from a ValidationReport's figures and details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gemma_neuron.render.page.plots import plots
from gemma_neuron.validation.bars import read_bars
from gemma_neuron.validation.text import MARKS, headline

if TYPE_CHECKING:
    from gemma_neuron.reports import Figure, LevelResult, ValidationReport

SIGNS = {"pass": "✓", "fail": "✗", "not-run": "–", "not-applicable": "○"}
TONES = {
    "works": "good", "insufficient": "open",
    "pass": "good", "not-run": "open", "not-applicable": "open",
}  # fmt: skip
"""Of verdicts and of levels; any other is bad."""
SHOWN = 70
"""Characters of a question or answer in its line."""


def content(report: ValidationReport) -> dict[str, Any]:
    """The template's variables; all text in them is still raw."""
    verdict, _, decided = headline(report).partition(":")
    answers = list(transcript(report))
    return {
        "verdict": verdict,
        "decided": decided.strip(),
        "tone": TONES.get(report.verdict, "bad"),
        "scope": report.scope,
        "warnings": report.warnings,
        "levels": [_level(item) for item in report.levels],
        "match": report.token_match,
        "plots": plots(report),
        "divergences": _detail(report, 5).get("divergences", []),
        "answers": answers,
        "wrong": sum(not answer["fine"] for answer in answers),
        "provenance": list(_flat(report.provenance)),
        "port": report.provenance.get("port", {}),
        "bars": list(_bars()),
    }


def transcript(report: ValidationReport) -> Iterator[dict[str, Any]]:
    """Every question with the port's judged answer (level 6, of a base model level 5) and the reference's (level 2)."""
    base, port, reference = (
        {answer["name"]: answer for answer in _detail(report, level).get("answers", [])}
        for level in (5, 6, 2)
    )
    port = port or base
    for name in dict.fromkeys([*reference, *port]):
        mine, theirs = port.get(name), reference.get(name)
        judged = mine or theirs
        assert judged is not None
        said = [("port", mine), ("reference", theirs)]
        if mine is not None and theirs is not None and mine["text"] == theirs["text"]:
            said = [("port, reference", mine)]
        yield {
            "name": name,
            "kind": judged["kind"],
            "asked": judged["asked"],
            "title": _line(judged["asked"][-1].get("content", "") if judged["asked"] else ""),
            "answer": _line(judged["text"]),
            "expected": judged["expected"],
            "said": [(who, answer) for who, answer in said if answer is not None],
            "fine": judged["right"] and not judged["problems"],
        }


def _line(text: object) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "…"


def _level(item: LevelResult) -> dict[str, Any]:
    return {
        "level": item.level,
        "name": item.name,
        "status": item.status,
        "mark": MARKS[item.status],
        "tone": TONES.get(item.status, "bad"),
        "sign": SIGNS[item.status],
        "reason": item.reason,
        "problems": item.detail.get("problems", [])[1:],
        "figures": [_figure(figure) for figure in item.figures],
        "tolerance": item.detail.get("tolerance", {}).get("source", ""),
        "seconds": f"{item.seconds:.1f}",
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "value": f"{figure.value:.4g}",
        "bar": f"{'≤' if figure.sense == 'at-most' else '≥'} {figure.bar:.4g}",
        "passes": figure.passes,
    }


def _detail(report: ValidationReport, level: int) -> dict[str, Any]:
    return next((item.detail for item in report.levels if item.level == level), {})


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as (dotted name, text)."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield name, ", ".join(str(item) for item in value) or "none"
    else:
        yield name, "none" if value in (None, "") else str(value)


def _bars() -> Iterator[tuple[str, str, str]]:
    """(name, value, source) of every bar there is."""
    for name, section in read_bars().model_dump().items():
        if isinstance(section, dict):
            for path, bar in _leaves(section, name):
                yield path, f"{bar['value']:g}", bar["source"]


def _leaves(section: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if "source" in section:
        yield name, section
        return
    for key, item in section.items():
        yield from _leaves(item, f"{name}.{key}")
