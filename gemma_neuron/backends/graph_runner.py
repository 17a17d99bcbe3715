"""The part of a `Runner` that every back end shares: which graph a call needs, its padded inputs, its checks.

A back end adds `run`: one graph by name, numpy arrays in, float32 arrays out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.backends.base import Scores, UnitSpec
from gemma_neuron.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from gemma_neuron.artifacts import Manifest
    from gemma_neuron.port import Port


class GraphRunner(ABC):
    """See `backends.base.Runner`; `run` and `close` are the back end's."""

    def __init__(self, port: Port) -> None:
        spec = port.spec
        self.vocab, self.slots = port.geometry.vocab, spec.slots
        self.max_context, self.prefill_buckets = spec.max_context, spec.buckets
        self.score_length = min(spec.score_length, spec.max_context)
        sliding = any(layer.kind == "sliding" for layer in port.geometry.layers)
        ring = min(port.geometry.window, spec.max_context)
        self.ring = ring if sliding and ring < spec.max_context else None

    @abstractmethod
    def run(self, unit: UnitSpec, *inputs: NDArray[np.int32]) -> list[NDArray[np.float32]]:
        """One graph: tokens, positions, slots, lengths and, for score, targets."""

    @abstractmethod
    def close(self) -> None: ...

    def save(self, slot: int) -> Any:
        """See `KeepsPrefix.save`: state that lies on a device is not copied."""
        return None

    def restore(self, slot: int, saved: Any) -> None:
        raise NotImplementedError  # nothing was ever saved

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> NDArray[np.float32]:
        self._check_span(len(tokens), slot, start, self.prefill_buckets[-1])
        bucket = next(n for n in self.prefill_buckets if n >= len(tokens))
        unit = UnitSpec(phase="prefill", batch=1, length=bucket)
        (logits,) = self.run(unit, *_row(unit, tokens, slot, start))
        last: NDArray[np.float32] = logits[0]
        return last

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> NDArray[np.float32]:
        if not len(tokens) == len(positions) == len(active) == self.slots:
            raise UsageError(f"decode takes one token for each of {self.slots} slots.")
        if any(
            on and not 0 <= p < self.max_context for p, on in zip(positions, active, strict=True)
        ):
            raise UsageError(f"A position is outside the port's context of {self.max_context}.")
        unit = UnitSpec(phase="decode", batch=self.slots, length=1)
        column = np.asarray(tokens, np.int32)[:, None], np.asarray(positions, np.int32)[:, None]
        rows = np.arange(self.slots, dtype=np.int32), np.asarray(active, np.int32)
        (logits,) = self.run(unit, *column, *rows)
        return logits

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], *, slot: int, start: int
    ) -> Scores:
        self._check_span(len(tokens), slot, start, self.score_length)
        unit = UnitSpec(phase="score", batch=1, length=self.score_length)
        wanted = np.zeros((1, unit.length), np.int32)
        wanted[0, : len(targets)] = targets
        logprob, total, logits = self.run(unit, *_row(unit, tokens, slot, start), wanted)
        count = len(tokens)
        return Scores(logits[0, :count], total[0, :count], logprob[0, :count])

    def _check_span(self, count: int, slot: int, start: int, most: int) -> None:
        if not 1 <= count <= most:
            raise UsageError(f"A chunk of {count} tokens; this port's graphs take 1 to {most}.")
        if not 0 <= slot < self.slots:
            raise UsageError(f"Slot {slot}; this port has slots 0 to {self.slots - 1}.")
        if start < 0 or start + count > self.max_context:
            raise UsageError(
                f"Positions {start} to {start + count - 1}; this port's context is {self.max_context}.",
                "Compile with a larger --max-context.",
            )


def verified_unit(port: Port, unit: UnitSpec, here: dict[str, str]) -> Manifest:
    """A unit's manifest, its files checked; `here`: the facts of its key that must hold on this host too.

    Raises IntegrityError when the folder holds another graph, one for other slots, context, dtype or plan, or
    one that was compiled for another host.
    """
    manifest = port.unit_set(unit).verify()
    found = manifest.facts.get("key", {})
    if found.get("shape") != unit.name:
        raise IntegrityError(
            f"{port.unit_folder(unit)} holds {found.get('shape', 'no graph')}, not {unit.name}.",
            "Run `gemma-neuron compile` with the same arguments: it rebuilds it.",
        )
    if manifest.facts.get("shared") != port.spec.shared_digest(port.plan.fingerprint()):
        raise IntegrityError(
            f"{unit.name} was compiled for other slots, context, dtype or plan than port.json says.",
            "Run `gemma-neuron compile` with the same arguments: it rebuilds what differs.",
        )
    if wrong := [name for name, value in here.items() if found.get(name) != value]:
        raise IntegrityError(
            f"{unit.name} was compiled for another host: "
            + "; ".join(f"{n} {found.get(n)!r}, here {here[n]!r}" for n in wrong)
            + ".",
            "Run `gemma-neuron compile` with the same arguments on this machine.",
        )
    return manifest


def _row(
    unit: UnitSpec, tokens: Sequence[int], slot: int, start: int
) -> tuple[NDArray[np.int32], ...]:
    """One padded row: tokens, positions (0 in padding), slot, length."""
    count = len(tokens)
    padded, positions = np.zeros((2, 1, unit.length), np.int32)
    padded[0, :count] = tokens
    positions[0, :count] = np.arange(start, start + count)
    return padded, positions, np.array([slot], np.int32), np.array([count], np.int32)
