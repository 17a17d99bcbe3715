"""What `inspect` shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gemma_neuron.render import emit_lines, size
from gemma_neuron.render.table import table

if TYPE_CHECKING:
    from gemma_neuron.reports import AuditReport, LedgerEntry

MOST_PLACES = 4


def show_audit(report: AuditReport, tensors: bool = False) -> None:
    """The verdict first, then findings, the ledger's counts, with `tensors` its rows, and the buffers."""
    counts = report.tensors
    lines = [
        f"{report.verdict}: {len(report.errors)} errors, {len(report.warnings)} warnings",
        *(f"{f.severity}: {f.kind}: {f.message}" for f in report.findings),
        f"tensors: {counts.used} used, {counts.tied} tied, {counts.derived} derived, "
        f"{counts.skipped} skipped, {counts.unexplained} unexplained",
        *_skipped_lines(report),
        *_rank_lines(report),
        f"chat template: {_template_line(report.chat_template)}",
        f"stop token ids: {', '.join(map(str, report.stop_token_ids)) or 'none'}",
    ]
    emit_lines(lines)
    if tensors:
        emit_lines(map(_ledger_line, report.ledger))
    if report.buffers:
        rows = [
            (b.tensor, "x".join(map(str, b.shape)), b.dtype, f"{b.min:.6g}", f"{b.max:.6g}")
            for b in report.buffers
        ]
        table("persistent buffers", ("tensor", "shape", "dtype", "min", "max"), rows)


def _template_line(template: dict[str, Any]) -> str:
    return f"{template['source']}, sha256 {template['sha256']}" if template["present"] else "none"


def _skipped_lines(report: AuditReport) -> Iterator[str]:
    """Each rule with its count and where its tensors stand: numbers in names are left out."""
    places: dict[str, Counter[str]] = defaultdict(Counter)
    for row in report.ledger:
        if row.status == "skipped":
            places[row.rule][".".join(row.tensor.split(".")[:2])] += 1
    for rule, count in report.skipped_by_rule.items():
        found = places[rule].most_common(MOST_PLACES)
        shown = ", ".join(f"{place}.* {n}" for place, n in found)
        yield f"skipped by rule {rule}: {count}" + (f" ({shown})" if shown else "")


def _rank_lines(report: AuditReport) -> Iterator[str]:
    ranks = report.ranks
    if ranks is not None:
        planned = sum(row.ranks is not None for row in report.ledger)
        yield (
            f"rank files: {ranks.committed} of {ranks.planned} committed, {size(ranks.bytes)}; "
            f"{ranks.tensors} of {planned} parameters as planned on every rank"
        )


def _ledger_line(row: LedgerEntry) -> str:
    """One tensor on one line, for reading and for grep."""
    shape = "x".join(map(str, row.shape)) or "scalar"
    line = f"{row.status:<11} {row.tensor or row.model} {row.dtype} {shape}"
    if row.model and row.tensor:
        line += f" -> {row.model}"
    if row.rule:
        line += f" ({row.rule})"
    if row.rank_shape is not None:
        line += f" | {row.placement}, {'x'.join(map(str, row.rank_shape))} on {row.ranks} ranks"
    return line
