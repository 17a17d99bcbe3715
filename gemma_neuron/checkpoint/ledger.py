"""Every tensor of a checkpoint accounted for against the model's parameter table.

In: an index and a table. Out: `Ledger`: where each parameter of ours lies, and findings for whatever is
neither used, tied, optional nor skipped by a named rule, and for whatever is expected and absent.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass, field

from gemma_neuron.checkpoint.findings import FindingList
from gemma_neuron.checkpoint.index import CheckpointIndex, TensorEntry
from gemma_neuron.checkpoint.values import pieces, spots
from gemma_neuron.models.weights import HEAD, HEAD_NAMES
from gemma_neuron.parameters import ParameterSpec, ParameterTable
from gemma_neuron.reports import Finding, FindingKind, LedgerEntry, LedgerStatus, Severity

ALLOWED_DTYPES = ("BF16", "F32")
BORROWED_RULE = "borrowed-kv"
DAMAGE: tuple[FindingKind, ...] = (
    "bad-header",
    "index-missing-file",
    "offset-out-of-range",
    "offset-overlap",
    "truncated-file",
    "unsafe-name",
)
"""Findings about a weights file or the index after which nobody can say what is missing by name."""
MOST_GUESSES = 20
"""Names a nearest match is looked for; comparing hundreds with hundreds takes minutes."""
COMPARE_ALL_BYTES = 1024 * 1024 * 1024
"""A tied copy up to this size is compared whole; of a larger one every SAMPLED_PIECE-th piece is, unless
all values are read anyway. Of a remote one a few short stretches are: a head trained apart differs in all."""
SAMPLED_PIECE = 16


@dataclass(frozen=True)
class Ledger:
    """`used`: our name → entry. `tied`: checkpoint name → entry. `skipped`: checkpoint name → rule;
    `left_out` are the same tensors' entries."""

    used: dict[str, TensorEntry]
    tied: dict[str, TensorEntry]
    skipped: dict[str, str]
    left_out: tuple[TensorEntry, ...]
    unexplained: tuple[TensorEntry, ...]
    findings: tuple[Finding, ...]

    def entries(self, table: ParameterTable) -> tuple[LedgerEntry, ...]:
        """Every tensor of the checkpoint and every parameter of the model, each once."""
        rows = [_row("used", entry, model=name) for name, entry in self.used.items()]
        rows += [_row("tied", e, rule=f"repeats {table.tied[e.name]}") for e in self.tied.values()]
        rows += [_row("skipped", e, rule=self.skipped[e.name]) for e in self.left_out]
        rows += [_row("unexplained", entry) for entry in self.unexplained]
        rows += [
            LedgerEntry(
                status="derived",
                tensor="",
                file="",
                model=spec.name,
                dtype=str(spec.dtype),
                shape=spec.shape,
            )
            for spec in table
            if spec.origin == "derived"
        ]
        return tuple(rows)

    @property
    def skipped_by_rule(self) -> dict[str, int]:
        return dict(sorted(Counter(self.skipped.values()).items()))


def _row(
    status: LedgerStatus, entry: TensorEntry, *, model: str = "", rule: str = ""
) -> LedgerEntry:
    return LedgerEntry(
        status=status,
        tensor=entry.name,
        file=entry.file.name,
        model=model,
        dtype=entry.dtype,
        shape=entry.shape,
        rule=rule,
    )


def build_ledger(
    index: CheckpointIndex, table: ParameterTable, *, whole_copies: bool = False
) -> Ledger:
    """Account for every tensor. `whole_copies` compares tied copies of any size byte by byte."""
    return _Builder(index, table, whole_copies).build()


@dataclass
class _Builder:
    index: CheckpointIndex
    table: ParameterTable
    whole_copies: bool
    used: dict[str, TensorEntry] = field(default_factory=dict)
    tied: dict[str, TensorEntry] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unexplained: list[TensorEntry] = field(default_factory=list)
    findings: FindingList = field(default_factory=FindingList)

    def build(self) -> Ledger:
        self.specs = {s.name: s for s in self.table if s.origin == "checkpoint"}
        for name, entry in self.index.tensors.items():
            self._place(name, entry)
        missing = [name for name in self.specs if name not in self.used]
        self._report_missing(missing)
        self._report_unexpected(missing)
        for name, entry in self.used.items():
            self._check_shape(self.specs[name], entry)
        self._check_dtypes()
        for entry in self.tied.values():
            self._check_copy(entry)
        return Ledger(
            self.used,
            self.tied,
            self.skipped,
            tuple(self.index.tensors[name] for name in self.skipped),
            tuple(self.unexplained),
            self.findings.done(),
        )

    def _add(
        self,
        kind: FindingKind,
        message: str,
        entry: TensorEntry | None = None,
        *,
        tensor: str = "",
        severity: Severity = "error",
    ) -> None:
        self.findings.add(
            kind,
            message,
            severity=severity,
            tensor=entry.name if entry else tensor,
            file=entry.file.name if entry else "",
        )

    def _place(self, name: str, entry: TensorEntry) -> None:
        """Decide what one tensor is. Rules come first: a vision tower has `layers.5` of its own."""
        rule = self.table.skip_rule(name)
        local = HEAD if name in HEAD_NAMES else self.table.local_name(name)
        if rule is not None:
            self.skipped[name] = rule
        elif name in self.table.tied:
            self.tied[name] = entry
        elif local in self.specs:
            if local in self.used:
                first = self.used[local]
                self._add(
                    "duplicate-tensor",
                    f"{name} and {first.name} are both the model's {local}; one must go.",
                    entry,
                )
            else:
                self.used[local] = entry
        elif local in self.table.optional:
            self.skipped[name] = BORROWED_RULE
        else:
            self.unexplained.append(entry)

    def _prefix(self) -> str:
        """What stands before this checkpoint's text tensors, to name missing ones in its own way."""
        found = Counter(
            entry.name[: -len(local)] for local, entry in self.used.items() if local != HEAD
        )
        return found.most_common(1)[0][0] if found else self.table.prefixes[0]

    def _report_missing(self, missing: list[str]) -> None:
        prefix = self._prefix()
        damaged = sorted({f.file for f in self.index.findings if f.kind in DAMAGE})
        if missing and damaged:
            first = prefix + missing[0]
            self._add(
                "missing",
                f"{len(missing)} tensors of the model of config.json were not found, {first} first; they may be "
                f"in what is damaged or missing: {', '.join(damaged[:3])}.",
                tensor=first,
            )
            return
        if missing and not self.used and not self.unexplained:
            self._add(
                "missing",
                f"None of the {len(missing)} tensors of the model of config.json is there, "
                f"{prefix + missing[0]} the first.",
                tensor=prefix + missing[0],
            )
            return
        for local in missing:
            spec = self.specs[local]
            full = local if local == HEAD else prefix + local
            why = ""
            if spec.buffer:
                why = (
                    " It is a persistent buffer, which tools that save or load parameters only lose; "
                    "without it the layer runs with 1.0 and the answers are wrong."
                )
            elif local == HEAD:
                why = " config.json says tie_word_embeddings false, so the head is a tensor of its own."
            self._add(
                "missing",
                f"{full} {list(spec.shape)} is missing: the model of config.json has it.{why}",
                tensor=full,
            )

    def _report_unexpected(self, missing: list[str]) -> None:
        for number, entry in enumerate(self.unexplained):
            self._add(
                "unexpected",
                f"{entry.name} {list(entry.shape)} is no tensor of the model of config.json"
                f"{self._guess(entry.name, missing) if number < MOST_GUESSES else ''}.",
                entry,
            )

    def _guess(self, name: str, missing: list[str]) -> str:
        base = self.table.local_name(name) or name
        if (
            base.endswith(".self_attn.v_proj.weight")
            and base.replace("v_proj", "k_proj") in self.specs
        ):
            return (
                " (attention_k_eq_v: this layer's V is its K, a v_proj of its own contradicts that)"
            )
        near = difflib.get_close_matches(base, missing or self.specs, n=1, cutoff=0.6)
        return f"; did you mean {near[0]}?" if near else ""

    def _check_shape(self, spec: ParameterSpec, entry: TensorEntry) -> None:
        if entry.shape != spec.shape:
            self._add(
                "shape",
                f"{entry.name} has shape {list(entry.shape)}; by config.json it is {list(spec.shape)}.",
                entry,
            )

    def _check_dtypes(self) -> None:
        counts = Counter(entry.dtype for entry in self.used.values())
        for dtype, count in counts.items():
            if dtype not in ALLOWED_DTYPES:
                first = next(entry for entry in self.used.values() if entry.dtype == dtype)
                why = "BF16 or F32 is needed."
                if dtype == "F16":
                    why = (
                        "Gemma's activations exceed float16's range and give NaN or empty answers. Use the "
                        "bfloat16 release."
                    )
                more = f" (and {count - 1} more tensors)" if count > 1 else ""
                self._add("dtype", f"{first.name}{more} is {dtype}. {why}", first)
        if counts["BF16"] and counts["F32"]:
            rare = "F32" if counts["F32"] <= counts["BF16"] else "BF16"
            first = next(entry for entry in self.used.values() if entry.dtype == rare)
            self._add(
                "dtype",
                f"{counts['BF16']} tensors are BF16 and {counts['F32']} F32; {first.name} is the first in "
                f"{rare}.",
                first,
                severity="warning",
            )

    def _check_copy(self, entry: TensorEntry) -> None:
        target = self.used.get(self.table.tied[entry.name])
        if target is None:
            return  # the table itself is missing, which is a finding
        if entry.shape != target.shape:
            self._add(
                "shape",
                f"{entry.name} has shape {list(entry.shape)}; it is tied to {target.name} "
                f"{list(target.shape)}.",
                entry,
            )
        elif not self._equal(entry, target):
            self._add(
                "tied-differs",
                f"{entry.name} differs from {target.name}, though config.json says tie_word_embeddings: one "
                "of the two would be dropped without a word. Set tie_word_embeddings at the top of config.json to "
                "false if the head was trained apart; remove the copy if it was not.",
                entry,
            )

    def _equal(self, entry: TensorEntry, target: TensorEntry) -> bool:
        if entry.dtype != target.dtype:
            return False
        if self.index.source.files.remote:
            both = zip(spots(self.index, entry), spots(self.index, target), strict=True)
            return all(mine == theirs for mine, theirs in both)
        step = 1
        if entry.bytes > COMPARE_ALL_BYTES and not self.whole_copies:
            step = SAMPLED_PIECE
        return all(
            mine == theirs
            for mine, theirs in zip(
                pieces(self.index, entry, step), pieces(self.index, target, step), strict=True
            )
        )
