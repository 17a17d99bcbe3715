"""Edits of a checkpoint on disk, and questions to a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma_neuron.checkpoint.audit import audit, require_ok
from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.errors import AuditFailed
from gemma_neuron.reports import AuditReport, Finding
from tests.tiny import Tensor, read_safetensors, write_json, write_safetensors

TEXT4 = "model.language_model."
Tensors = dict[str, Tensor]


def inspect(folder: Path, **options: Any) -> AuditReport:
    return audit(open_source(str(folder)), **options)


def edit_tensors(
    folder: Path, change: Callable[[Tensors], object], file: str = "model.safetensors"
) -> None:
    """Rewrite one weights file after `change` worked on its tensors in place."""
    tensors = read_safetensors(folder / file)
    change(tensors)
    write_safetensors(folder / file, tensors)


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads((folder / name).read_text())
    change(value)
    write_json(folder / name, value)


def of_kind(report: AuditReport, kind: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == kind]


def only(report: AuditReport, kind: str, severity: str = "error") -> Finding:
    """The report's single finding, of this kind and severity; errors stop the port with exit 3."""
    shown = [(f.kind, f.severity, f.message) for f in report.findings]
    assert [(f.kind, f.severity) for f in report.findings] == [(kind, severity)], shown
    assert report.verdict == ("broken" if severity == "error" else "ok")
    if severity == "error":
        try:
            require_ok(report)
        except AuditFailed as error:
            assert error.exit_code == 3
            assert kind in error.message
        else:
            raise AssertionError("a broken report was let through")
    else:
        require_ok(report)
    return report.findings[0]


def clean(report: AuditReport) -> None:
    assert [(f.kind, f.message) for f in report.findings] == []
    assert report.verdict == "ok"
