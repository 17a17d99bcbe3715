"""What stages report: findings of the audit, levels and verdict of the validator.

In: nothing. Out: frozen values with `to_json` in the field names of the JSON contract.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]
FindingKind = Literal[
    "missing", "unexpected", "shape", "dtype", "truncated-file", "offset-overlap",
    "offset-out-of-range", "index-missing-file", "index-missing-tensor", "not-in-index",
    "stray-file", "duplicate-tensor", "non-finite", "all-zero", "all-one", "tied-differs",
    "template-missing", "template-unsafe", "tokenizer-missing", "stop-ids-reduced",
    "token-id-contradiction", "unsafe-name", "unsafe-format", "quantised", "adapter", "bad-header",
    "rank-differs",
]  # fmt: skip
LedgerStatus = Literal["used", "tied", "derived", "skipped", "unexplained"]
LevelName = Literal[
    "prompt", "weights", "reference", "logits", "position", "generation", "chat", "task"
]
LEVEL_NAMES: tuple[LevelName, ...] = (
    "prompt", "weights", "reference", "logits", "position", "generation", "chat", "task"
)  # fmt: skip
LevelStatus = Literal["pass", "fail", "not-run", "not-applicable"]
Verdict = Literal["works", "matches-but-broken", "differs", "insufficient"]
Scope = Literal["chat", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing the audit objects to; `tensor` and `file` are names, empty where none is meant."""

    kind: FindingKind
    severity: Severity
    message: str
    tensor: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferValues:
    """A persistent buffer's value range, read from the file."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCounts:
    used: int
    tied: int
    derived: int
    skipped: int
    unexplained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One tensor's account: what the checkpoint holds and what the model makes of it.

    `tensor` and `file` are empty for derived tensors, `model` (our name) for those that no parameter uses.
    `rule` names why one is skipped, and what a tied one repeats. After `shard`, a parameter also has its
    `placement`, its shape on one rank and the number of rank files that hold it so.
    """

    status: LedgerStatus
    tensor: str
    file: str
    model: str
    dtype: str
    shape: tuple[int, ...]
    rule: str = ""
    placement: str = ""
    rank_shape: tuple[int, ...] | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """The third side of the ledger. `tensors`: parameters of the plan that every rank file holds as planned."""

    planned: int
    committed: int
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The checkpoint's ledger. `skipped_by_rule`: rule → number of tensors left out by it."""

    findings: tuple[Finding, ...]
    tensors: TensorCounts
    buffers: tuple[BufferValues, ...]
    geometry: dict[str, Any]
    chat_template: dict[str, Any]
    stop_token_ids: tuple[int, ...]
    skipped_by_rule: dict[str, int] = field(default_factory=dict)
    ledger: tuple[LedgerEntry, ...] = ()
    ranks: RankCounts | None = None
    """None before `shard`."""
    checkpoint_digest: str = ""
    """blake3 over the headers of all weight files, names sorted."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def warning_lines(self) -> tuple[str, ...]:
        """What later stages repeat."""
        return tuple(f"{found.kind}: {found.message}" for found in self.warnings)

    @property
    def verdict(self) -> Literal["ok", "broken"]:
        return "broken" if self.errors else "ok"

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The worst value a level measured of something, beside the bar that judges it."""

    name: str
    value: float
    bar: float
    sense: Literal["at-most", "at-least"] = "at-most"
    """Which side of the bar passes."""

    @property
    def passes(self) -> bool:
        return self.value <= self.bar if self.sense == "at-most" else self.value >= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One validation level. `reason` is one line; `figures` are what its bars judge, `detail` the rest."""

    level: int
    name: LevelName
    status: LevelStatus
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    verdict: Verdict
    scope: Scope
    levels: tuple[LevelResult, ...]
    token_match: dict[str, int]
    """compared, equal: greedy tokens of port and reference."""
    first_divergence: dict[str, Any] | None
    """prompt, position, port_token, reference_token, margin (reference's logit lead); or None."""
    warnings: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, Any] | None = None
    """Hidden states of port and reference by layer, when it was asked for (validation/drift.py)."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
