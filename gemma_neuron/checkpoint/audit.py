"""`inspect`: is this checkpoint whole, and is every tensor of it explained?

In: a `Source`. Out: `AuditReport`. Structure is judged from headers alone; the bytes of persistent buffers
are always read (a few), all others only with `values`. Raises ConfigError or UnknownModelError when
config.json does not say what the model is; everything else is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.checkpoint.formats import format_findings, tensor_findings
from gemma_neuron.checkpoint.index import CheckpointIndex, TensorEntry
from gemma_neuron.checkpoint.ledger import Ledger, build_ledger
from gemma_neuron.checkpoint.prompt_files import prompt_facts
from gemma_neuron.checkpoint.scan import Progress, scan_values
from gemma_neuron.checkpoint.selection import CONFIG_NAME
from gemma_neuron.checkpoint.source import Source, read_config
from gemma_neuron.checkpoint.values import read_buffers
from gemma_neuron.errors import AuditFailed, CheckpointError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.registry import (
    read_config_notes,
    read_geometry,
    read_parameter_table,
)
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.regular_files import FileState
from gemma_neuron.reports import AuditReport, Finding, FindingKind, TensorCounts

OTHER_FORMATS = ("adapter", "quantised", "unsafe-format")
"""With one of these the tensors are not of the model's table, and comparing them says nothing more."""


@dataclass(frozen=True)
class Audit:
    """The report, and what later stages need of how it was found."""

    report: AuditReport
    geometry: ModelGeometry | None
    table: ParameterTable | None
    index: CheckpointIndex
    ledger: Ledger | None

    def tensors(self) -> dict[str, TensorEntry]:
        """Our name of each parameter → where its bytes lie. Raises AuditFailed on a broken report."""
        require_ok(self.report)
        assert self.ledger is not None
        return self.ledger.used

    @property
    def states(self) -> dict[Path, FileState]:
        """The files those places lie in, as they were when their headers were read."""
        return {entry.file: self.index.states[entry.file] for entry in self.tensors().values()}


def audit(
    source: Source,
    *,
    values: bool = False,
    need_template: bool | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Report on a checkpoint.

    `values`: stream all bytes too, telling `progress` (bytes, tensor). `need_template`: see `prompt_facts`.
    """
    found = examine(source, values=values, need_template=need_template, progress=progress)
    return found.report


def examine(
    source: Source,
    *,
    values: bool = False,
    need_template: bool | None = None,
    progress: Progress | None = None,
) -> Audit:
    """As `audit`, with geometry, index and ledger, for the stages that go on from here."""
    # A folder without a config is an adapter or GGUF one; open_source lets no other in.
    config = read_config(source) if CONFIG_NAME in source.files.names() else None
    formats = format_findings(source, config)
    index = CheckpointIndex.open(source)
    geometry = None if config is None else _geometry(config, formats)
    if config is None or geometry is None:
        return Audit(_report(index, [*formats, *index.findings]), None, None, index, None)
    table = read_parameter_table(geometry)
    formats += tensor_findings(e for n, e in index.tensors.items() if table.skip_rule(n) is None)
    findings = [*formats, *index.findings, *_about_config(config, geometry)]
    prompt = prompt_facts(source, config, geometry, need_template)
    facts: dict[str, Any] = {
        "geometry": geometry.to_json(),
        "chat_template": prompt.template,
        "stop_token_ids": prompt.stop_ids,
    }
    ledger = None
    if not any(finding.kind in OTHER_FORMATS for finding in formats):
        ledger = build_ledger(index, table, whole_copies=values)
        found, about = _tensor_facts(index, table, ledger, values, progress)
        facts |= about
        findings += found
    report = _report(index, [*findings, *prompt.findings], **facts)
    return Audit(report, geometry, table, index, ledger)


def _geometry(config: dict[str, Any], formats: list[Finding]) -> ModelGeometry | None:
    """The model's geometry; None where the folder is something else anyway and its config says nothing."""
    try:
        return read_geometry(config)
    except CheckpointError:
        if any(finding.kind in OTHER_FORMATS for finding in formats):
            return None
        raise


def _tensor_facts(
    index: CheckpointIndex,
    table: ParameterTable,
    ledger: Ledger,
    values: bool,
    progress: Progress | None,
) -> tuple[list[Finding], dict[str, Any]]:
    """What ledger, buffers and (with `values`) all bytes say."""
    buffers, about_buffers = read_buffers(
        index, [(s.name, ledger.used[s.name]) for s in table if s.buffer and s.name in ledger.used]
    )
    findings = [*ledger.findings, *about_buffers]
    if values:
        told = {(finding.kind, finding.tensor) for finding in about_buffers}
        scanned = scan_values(index, [*ledger.used.values(), *ledger.tied.values()], progress)
        findings += [found for found in scanned if (found.kind, found.tensor) not in told]
    facts = {
        "buffers": tuple(buffers),
        "tensors": _counts(ledger, table),
        "skipped_by_rule": ledger.skipped_by_rule,
        "ledger": ledger.entries(table),
    }
    return findings, facts


def require_ok(report: AuditReport) -> None:
    """Raise AuditFailed naming the first errors when the report has any."""
    errors = report.errors
    if errors:
        shown = "; ".join(f"{found.kind}: {found.message}" for found in errors[:3])
        more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
        raise AuditFailed(
            f"The checkpoint has {len(errors)} errors: {shown}{more}",
            "Run `gemma-neuron inspect SOURCE` for the whole list.",
        )


def _about_config(config: dict[str, Any], geometry: ModelGeometry) -> list[Finding]:
    """What config.json says that is not acted on: foreign keys, overridden values, a dtype that is not run."""

    def warn(kind: FindingKind, message: str) -> Finding:
        return Finding(kind=kind, severity="warning", message=message, file=CONFIG_NAME)

    found = [warn("unexpected", note) for note in read_config_notes(config)]
    if geometry.dtype not in ("bfloat16", "float32"):
        # A float16 config over bfloat16 weights, as some tunes have: what reads the config would run in it.
        message = (
            f"config.json gives dtype {geometry.dtype}; Gemma's activations exceed float16, and only bfloat16 "
            "and float32 are run. Name one with --dtype, or set bfloat16 in config.json."
        )
        found.append(warn("dtype", message))
    return found


def _counts(ledger: Ledger, table: ParameterTable) -> TensorCounts:
    return TensorCounts(
        used=len(ledger.used),
        tied=len(ledger.tied),
        derived=sum(spec.origin == "derived" for spec in table),
        skipped=len(ledger.skipped),
        unexplained=len(ledger.unexplained),
    )


def _report(index: CheckpointIndex, findings: list[Finding], **facts: Any) -> AuditReport:
    """The report, errors first, each in the order found."""
    nothing: dict[str, Any] = {
        "tensors": TensorCounts(used=0, tied=0, derived=0, skipped=0, unexplained=0),
        "buffers": (),
        "geometry": {},
        "chat_template": {"present": False, "source": "", "sha256": ""},
        "stop_token_ids": (),
    }
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    return AuditReport(findings=tuple(ordered), checkpoint_digest=index.digest, **(nothing | facts))
