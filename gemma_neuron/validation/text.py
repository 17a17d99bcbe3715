"""The report as plain lines, the one that matters first; `render` prints them."""

from __future__ import annotations

from gemma_neuron.reports import LevelResult, ValidationReport
from gemma_neuron.validation.drift import parting_words
from gemma_neuron.validation.verdict import COMPARING

MARKS = {"pass": "pass", "fail": "FAIL", "not-run": "not run", "not-applicable": "n/a"}


def headline(report: ValidationReport) -> str:
    """The verdict and what decided it, in one line."""
    failed = [item for item in report.levels if item.status == "fail"]
    missing = [item for item in report.levels if item.status == "not-run"]
    if report.verdict == "works":
        match = report.token_match
        return (
            f"works (scope {report.scope}): {match['equal']} of {match['compared']} greedy tokens equal "
            "stock transformers', and the answers are right"
        )
    if report.verdict == "differs":
        where = parting_words(report.drift)
        named = _named(next(i for i in failed if i.level in COMPARING))
        return f"differs: {named}" + (f"; {where}" if where else "")
    if report.verdict == "matches-but-broken":
        return f"matches-but-broken: the port equals its reference, and both are wrong: {_named(failed[0])}"
    return f"insufficient: {_named((failed + missing)[0])}"


def lines(report: ValidationReport) -> list[str]:
    """The whole report for a terminal."""
    out = [headline(report)]
    out += [f"warning: {warning}" for warning in report.warnings]
    for item in report.levels:
        out.append(f"{item.level} {item.name:<11}{MARKS[item.status]:<8} {item.reason}")
    parting = report.first_divergence
    if parting is not None:
        out.append(
            f"first divergence: {parting['prompt']}, position {parting['position']}: port "
            f"{parting['port_token']}, reference {parting['reference_token']}, "
            f"margin {parting['margin']:.3g} logits"
        )
    if report.drift is not None:
        out.append(f"drift: {report.drift['summary']}")
    elif report.verdict == "differs":
        out.append("drift: not asked for; --drift names the first layer that parts")
    if "golden" in report.provenance:
        golden = report.provenance["golden"]
        made = "reused" if golden["reused"] else "made now"
        out.append(
            f"reference: {golden['producer']}, {golden['dtype']}, golden {golden['digest'][:12]} ({made})"
        )
    out.append(f"questions: {report.provenance.get('questions', {}).get('origin', 'none')}")
    return out


def _named(item: LevelResult) -> str:
    return f"level {item.level} ({item.name}): {item.reason}"
