"""What `inspect` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemma_neuron.render import emit_lines
from gemma_neuron.render.table import table

if TYPE_CHECKING:
    from gemma_neuron.reports import AuditReport


def show_audit(report: AuditReport) -> None:
    """The verdict first, then findings, the ledger's counts and the buffers."""
    counts = report.tensors
    lines = [
        f"{report.verdict}: {len(report.errors)} errors, {len(report.warnings)} warnings",
        *(f"{f.severity}: {f.kind}: {f.message}" for f in report.findings),
        f"tensors: {counts.used} used, {counts.tied} tied, {counts.derived} derived, "
        f"{counts.skipped} skipped, {counts.unexplained} unexplained",
        *(f"skipped by rule {rule}: {n}" for rule, n in report.skipped_by_rule.items()),
        f"chat template: {_template_line(report.chat_template)}",
        f"stop token ids: {', '.join(map(str, report.stop_token_ids)) or 'none'}",
    ]
    emit_lines(lines)
    if report.buffers:
        rows = [
            (b.tensor, "x".join(map(str, b.shape)), b.dtype, f"{b.min:.6g}", f"{b.max:.6g}")
            for b in report.buffers
        ]
        table("persistent buffers", ("tensor", "shape", "dtype", "min", "max"), rows)


def _template_line(template: dict[str, Any]) -> str:
    return f"{template['source']}, sha256 {template['sha256']}" if template["present"] else "none"
