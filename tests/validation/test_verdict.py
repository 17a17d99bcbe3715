"""The table from levels to a verdict, and the line that says it."""

from __future__ import annotations

import pytest

from gemma_neuron.reports import LEVEL_NAMES, LevelResult, LevelStatus, ValidationReport
from gemma_neuron.validation.text import headline, lines
from gemma_neuron.validation.verdict import scope, verdict

SHORT: dict[str, LevelStatus] = {"p": "pass", "f": "fail", "-": "not-run", "n": "not-applicable"}


def levels(statuses: str) -> tuple[LevelResult, ...]:
    """One letter a level: p, f, - or n."""
    return tuple(
        LevelResult(level=i, name=LEVEL_NAMES[i], status=SHORT[s], reason=f"reason {i}")
        for i, s in enumerate(statuses)
    )


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ("ppppppp", "works"),
        ("ppppppn", "works"),
        ("ppppppp" + "f", "works"),  # level 7 is extra
        ("ppppp-p", "insufficient"),
        ("pppp-pp", "insufficient"),
        ("p-ppppp", "insufficient"),
        ("pppppp-", "insufficient"),
        ("-------", "insufficient"),
        ("pp", "insufficient"),
        ("fpfpppf", "matches-but-broken"),
        ("ppfpppp", "matches-but-broken"),
        ("pppp" + "ppf", "matches-but-broken"),
        ("fpppppp", "matches-but-broken"),
        ("ppfp-pp", "matches-but-broken"),
        ("fp-----", "insufficient"),  # nothing was compared: nothing matches
        ("ppf----", "insufficient"),
        ("pppfppp", "differs"),
        ("ppppfpp", "differs"),
        ("pppppfp", "differs"),
        ("pfppppp", "differs"),
        ("fpffffp", "differs"),
        ("-f-----", "differs"),
    ],
)
def test_verdict(statuses: str, expected: str) -> None:
    assert verdict(levels(statuses)) == expected


def test_scope() -> None:
    assert scope(True, False) == "chat"
    assert scope(True, True) == "base"
    assert scope(False, False) == "base"


@pytest.mark.parametrize("statuses", ["ppppppp", "ppfpppp", "ppppfpp", "ppppp-p"])
def test_first_line_names_the_verdict_and_what_decided_it(statuses: str) -> None:
    found = levels(statuses)
    report = ValidationReport(
        verdict=verdict(found),
        scope="chat",
        levels=found,
        token_match={"compared": 9, "equal": 9},
        first_divergence=None,
        warnings=("all layer_scalar are 1",),
    )
    first = headline(report)
    assert first.startswith(report.verdict)
    odd = statuses.strip("p")
    if odd:
        assert f"level {statuses.index(odd)}" in first
    assert lines(report)[:2] == [first, "warning: all layer_scalar are 1"]
