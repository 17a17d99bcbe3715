"""A loaded port on the CPU: packages that share one set of weights and one KV state.

Weights are mapped from the rank files and, at one rank in the port's own dtype, never copied. Every package gets
the same KV tensors, which its graph writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from gemma_neuron.backends.base import CompileSpec, Scores, UnitSpec
from gemma_neuron.backends.cpu.compiler import PACKAGE_NAME
from gemma_neuron.backends.cpu.ranks import (
    TORCH_DTYPES,
    empty_state,
    flat,
    rank_axes,
    weight_dtype,
)
from gemma_neuron.backends.cpu.toolchain import host_key
from gemma_neuron.errors import IntegrityError, UsageError
from gemma_neuron.models.view import rank_view
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Port

Graph = Callable[..., list[torch.Tensor]]


def load_weights(port: Port) -> dict[str, torch.Tensor]:
    """Every weight with its rank axis, mapped where no copy is needed. Verifies each rank's digest."""
    plan, spec = port.plan, port.spec
    axes = rank_axes(plan, rank_view(port.geometry, plan, spec))
    for rank in range(plan.tp):
        port.rank_set(rank).verify()
    files: list[Any] = [safe_open(port.rank_file(rank), framework="pt") for rank in range(plan.tp)]
    dtype = TORCH_DTYPES[spec.dtype]
    weights = {}
    for p in plan.parameters:
        if axes[p.name] is None:
            tensor = files[0].get_tensor(p.name)
        else:
            tensor = torch.stack([file.get_tensor(p.name) for file in files])
        weights[p.name] = tensor.to(weight_dtype(plan, p.name, dtype))
    return weights


class CpuRunner:
    """See `backends.base.Runner`."""

    def __init__(self, port: Port) -> None:
        spec, plan = port.spec, port.plan
        self.vocab, self.slots = port.geometry.vocab, spec.slots
        self.max_context, self.prefill_buckets = spec.max_context, spec.buckets
        self.score_length = min(spec.score_length, spec.max_context)
        view = rank_view(port.geometry, plan, spec)
        self._state = empty_state(plan, view, TORCH_DTYPES[spec.dtype])
        self._tensors = {
            flat(name): tensor for name, tensor in (load_weights(port) | self._state).items()
        }
        self._graphs = {unit.name: self._load(port, unit) for unit in spec.units()}
        self._units = {unit.name: unit for unit in spec.units()}
        self._decode_flags = _decode_flags(plan, spec)

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> NDArray[np.float32]:
        self._check_span(len(tokens), slot, start, self.prefill_buckets[-1])
        bucket = next(n for n in self.prefill_buckets if n >= len(tokens))
        unit = UnitSpec(phase="prefill", batch=1, length=bucket)
        (logits,) = self._run(unit, *_row(unit, tokens, slot, start))
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
        with self._decode_flags():
            (logits,) = self._run(unit, *column, *rows)
        return logits

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], *, slot: int, start: int
    ) -> Scores:
        self._check_span(len(tokens), slot, start, self.score_length)
        unit = UnitSpec(phase="score", batch=1, length=self.score_length)
        wanted = np.zeros((1, unit.length), np.int32)
        wanted[0, : len(targets)] = targets
        logprob, total, logits = self._run(unit, *_row(unit, tokens, slot, start), wanted)
        count = len(tokens)
        return Scores(logits[0, :count], total[0, :count], logprob[0, :count])

    def close(self) -> None:
        self._graphs.clear()
        self._tensors.clear()

    def _run(self, unit: UnitSpec, *inputs: NDArray[np.int32]) -> list[NDArray[np.float32]]:
        with torch.inference_mode():
            outputs = self._graphs[unit.name](*(torch.from_numpy(x) for x in inputs))
        return [output.numpy() for output in outputs]

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

    def _load(self, port: Port, unit: UnitSpec) -> Graph:
        from torch._inductor import aoti_load_package

        manifest = port.unit_set(unit).verify()
        found, here = manifest.facts.get("key", {}), host_key()
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
        package: Any = aoti_load_package(str(port.unit_folder(unit) / PACKAGE_NAME))
        names = package.get_constant_fqns()
        if missing := sorted(set(names) - set(self._tensors)):
            raise IntegrityError(
                f"{unit.name} asks for {', '.join(missing[:4])}, which the rank files do not hold.",
                "Compile into a new folder.",
            )
        package.load_constants(
            {name: self._tensors[name] for name in names},
            check_full_update=False,
            user_managed=True,
        )
        graph: Graph = package
        return graph


def _row(
    unit: UnitSpec, tokens: Sequence[int], slot: int, start: int
) -> tuple[NDArray[np.int32], ...]:
    """One padded row: tokens, positions (0 in padding), slot, length."""
    count = len(tokens)
    padded, positions = np.zeros((2, 1, unit.length), np.int32)
    padded[0, :count] = tokens
    positions[0, :count] = np.arange(start, start + count)
    return padded, positions, np.array([slot], np.int32), np.array([count], np.int32)


def _decode_flags(plan: ShardPlan, spec: CompileSpec) -> Callable[[], AbstractContextManager[None]]:
    """oneDNN off for one-row bfloat16 products at one rank.

    Measured on 270M: its matrix-vector product takes 1.6 times as long as torch's own; from two rows on it
    is the faster one.
    """
    if spec.slots == 1 and plan.tp == 1 and spec.dtype == "bfloat16":
        return _without_onednn
    return nullcontext


@contextmanager
def _without_onednn() -> Iterator[None]:
    """The flag is the process's, so it is put back. `flags()` would also set what it does not change, and
    warn at each call of a flag of GPUs that are not there."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)
