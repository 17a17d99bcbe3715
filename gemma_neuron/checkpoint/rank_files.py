"""The ledger's third side: does every rank file hold what the plan says, and what the audit saw?

In: a port after `shard`. Out: its audit report with rank files accounted for. Headers, buffers and ranks' numbers are
always read; digests and values of all bytes only with `values`. Findings, never exceptions, about the files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemma_neuron.checkpoint.findings import FindingList
from gemma_neuron.checkpoint.header import FileHeader, TensorEntry, read_header
from gemma_neuron.checkpoint.index import CheckpointIndex
from gemma_neuron.checkpoint.scan import Progress, scan_values
from gemma_neuron.checkpoint.source import Source
from gemma_neuron.checkpoint.storage import LocalFiles
from gemma_neuron.checkpoint.values import LARGEST_BUFFER, to_float
from gemma_neuron.errors import IntegrityError, PortIncompleteError
from gemma_neuron.plan import PlannedParameter
from gemma_neuron.port import Port
from gemma_neuron.regular_files import RefusedFileError
from gemma_neuron.reports import (
    AuditReport,
    BufferValues,
    FindingKind,
    LedgerEntry,
    RankCounts,
)

AUDIT_NAME = "audit.json"
DERIVED_DTYPES = {"float32": "F32", "int32": "I32"}
AGAIN = "Run the command that made the port again: it writes what is missing."


def audit_ranks(
    port: Port, *, values: bool = False, progress: Progress | None = None
) -> AuditReport:
    """The port's audit with its rank files. Raises PortIncompleteError, IntegrityError (audit.json, plan.json)."""
    return _Auditor(port, read_audit(port)).report(values, progress)


def require_ranks(port: Port) -> AuditReport:
    """As `audit_ranks`; IntegrityError naming the first errors when rank files are not as planned."""
    report = audit_ranks(port)
    errors = report.errors
    if errors:
        shown = "; ".join(f"{found.kind}: {found.message}" for found in errors[:3])
        more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
        raise IntegrityError(f"{port.path}: rank files are not as planned: {shown}{more}", AGAIN)
    return report


def read_audit(port: Port) -> AuditReport:
    """The report that `shard` left in the port. Raises PortIncompleteError or IntegrityError."""
    found = port.read_json(AUDIT_NAME)
    if found is None:
        raise PortIncompleteError(f"{port.path} has no {AUDIT_NAME}.", AGAIN)
    try:
        return TypeAdapter(AuditReport).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise IntegrityError(
            f"{port.path / AUDIT_NAME} is no audit report: {error.error_count()} problems, first "
            f"{first['loc']}: {first['msg']}.",
            AGAIN,
        ) from error


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    file: Path
    header: FileHeader
    tensors: dict[str, TensorEntry]


class _Auditor:
    def __init__(self, port: Port, audited: AuditReport) -> None:
        self.port = port
        self.audited = audited
        self.files = LocalFiles(port.weights_folder)
        self.findings = FindingList()
        self.planned = {parameter.name: parameter for parameter in port.plan.parameters}
        self.rows = {row.model: row for row in audited.ledger if row.model}
        self.buffers = {buffer.tensor: buffer for buffer in audited.buffers}
        self.as_planned: Counter[str] = Counter()

    def report(self, values: bool, progress: Progress | None) -> AuditReport:
        self._compare_with_checkpoint()
        tp = self.port.plan.tp
        ranks = [rank for number in range(tp) if (rank := self._rank(number)) is not None]
        for rank in ranks:
            self._compare(rank)
        if values:
            self._read_all(ranks, progress)
        counts = RankCounts(
            planned=tp,
            committed=sum(self.port.rank_set(n).marker_path.is_file() for n in range(tp)),
            tensors=sum(count == tp for count in self.as_planned.values()),
            bytes=sum(rank.header.size for rank in ranks),
        )
        ordered = [*self.findings.done(), *self.audited.findings]
        ordered.sort(key=lambda finding: finding.severity != "error")
        return replace(
            self.audited,
            findings=tuple(ordered),
            ledger=tuple(map(self._with_ranks, self.audited.ledger)),
            ranks=counts,
        )

    def _with_ranks(self, row: LedgerEntry) -> LedgerEntry:
        parameter = self.planned.get(row.model)
        if parameter is None:
            return row
        return replace(
            row,
            placement=parameter.placement.kind,
            rank_shape=parameter.local_shape,
            ranks=self.as_planned[row.model],
        )

    def _add(self, kind: FindingKind, rank: int, message: str, tensor: str = "") -> None:
        file = self.port.rank_file(rank).name
        self.findings.add(kind, f"{file} {message}", tensor=tensor, file=file)

    def _compare_with_checkpoint(self) -> None:
        """Plan and audit of the checkpoint must be of one model; a changed audit.json is found here."""
        for name in sorted(self.planned.keys() - self.rows.keys()):
            self.findings.add("missing", f"{name} is planned but not in {AUDIT_NAME}.", tensor=name)
        for name in sorted(self.rows.keys() - self.planned.keys()):
            self.findings.add("unexpected", f"{name} was audited but is not planned.", tensor=name)

    def _rank(self, number: int) -> _Rank | None:
        """A committed rank file's header, or None with a finding that says what keeps it from being one."""
        path = self.port.rank_file(number)
        try:
            manifest = self.port.rank_set(number).manifest()
            if manifest is None:
                self._add("index-missing-file", number, f"is not committed. {AGAIN}")
                return None
            with self.files.opened(path.name) as file:
                header = read_header(file, path)
        except IntegrityError as error:
            self._add("bad-header", number, f"has a damaged manifest: {error.message}")
            return None
        except FileNotFoundError:
            self._add("index-missing-file", number, f"is missing. {AGAIN}")
            return None
        except RefusedFileError as error:
            self._add("unsafe-name", number, f"is not opened: {error.message}")
            return None
        self.findings.extend(header.findings)
        committed = next((entry.bytes for entry in manifest.files if entry.name == path.name), 0)
        if header.size != committed:
            message = f"has {header.size:,} bytes; {committed:,} were committed."
            self._add("truncated-file", number, message)
        return _Rank(number, path, header, {entry.name: entry for entry in header.tensors})

    def _compare(self, rank: _Rank) -> None:
        for name in sorted(rank.tensors.keys() - self.planned.keys()):
            self._add("unexpected", rank.number, f"holds {name}, which is not planned.", name)
        for name, parameter in self.planned.items():
            entry = rank.tensors.get(name)
            if entry is None:
                what = ", a persistent buffer," if parameter.buffer else ""
                self._add("missing", rank.number, f"lacks {name}{what} that the plan has.", name)
            elif self._is_as_planned(rank, parameter, entry):
                self.as_planned[name] += 1

    def _is_as_planned(self, rank: _Rank, parameter: PlannedParameter, entry: TensorEntry) -> bool:
        name, wanted = parameter.name, self._dtype(parameter)
        if entry.shape != parameter.local_shape:
            self._add(
                "shape",
                rank.number,
                f"holds {name} {list(entry.shape)}; planned are {list(parameter.local_shape)} of "
                f"{list(parameter.shape)} ({parameter.placement.kind}).",
                name,
            )
        elif wanted and entry.dtype != wanted:
            self._add("dtype", rank.number, f"holds {name} as {entry.dtype}, not {wanted}.", name)
        elif (parameter.buffer or parameter.placement.kind == "rank") and (
            problem := self._value_problem(rank, parameter, entry)
        ):
            self._add("rank-differs", rank.number, f"holds {name} {problem}", name)
        else:
            return True
        return False

    def _dtype(self, parameter: PlannedParameter) -> str:
        if parameter.derived:
            return DERIVED_DTYPES[str(parameter.dtype)]
        row = self.rows.get(parameter.name)
        return row.dtype if row is not None else ""

    def _value_problem(self, rank: _Rank, parameter: PlannedParameter, entry: TensorEntry) -> str:
        """What is wrong with a small tensor's values, as the end of a sentence, or ''."""
        if not 0 < entry.bytes <= LARGEST_BUFFER:
            return ""
        with self.files.opened(rank.file.name) as file:
            data = file.read(entry.bytes, entry.start)
        if parameter.placement.kind == "rank":
            number = int.from_bytes(data, "little")
            return "" if number == rank.number else f"{number}; it is rank {rank.number}."
        found = to_float(data, entry.dtype)
        low, high = float(found.min()), float(found.max())
        row = self.rows.get(parameter.name)
        seen = self.buffers.get(row.tensor) if row is not None else None
        if seen is None or (low, high) == (seen.min, seen.max):
            return ""
        return f"from {low:.6g} to {high:.6g}; the checkpoint has {_range(seen)}."

    def _read_all(self, ranks: list[_Rank], progress: Progress | None) -> None:
        """Digests first, then values; what the checkpoint's own values are is no fault of a rank file."""
        for rank in ranks:
            try:
                self.port.rank_set(rank.number).verify()
            except IntegrityError as error:
                self._add(
                    "rank-differs", rank.number, f"is not what was committed: {error.message}"
                )
        source = Source(
            kind="folder",
            uri=str(self.port.path),
            folder=self.port.weights_folder,
            files=self.files,
        )
        index = CheckpointIndex(source, tuple(rank.header for rank in ranks), {}, ())
        entries = [
            entry
            for rank in ranks
            for entry in rank.header.tensors
            if entry.name in self.planned and not self.planned[entry.name].derived
        ]
        self.findings.extend(scan_values(index, entries, progress))


def _range(seen: BufferValues) -> str:
    return f"{seen.min:.6g}" if seen.min == seen.max else f"{seen.min:.6g} to {seen.max:.6g}"
