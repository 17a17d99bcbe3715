"""What a port takes of the host's memory: four ways of getting there, side by side. No torch.

Two of the ways are what was seen elsewhere and what this toolkit does not do; they stand beside ours so that nobody
sizes a machine by them, or tries them on one that is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gemma_neuron.artifacts import CHUNK_BYTES
from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.weights import PER_LAYER_TABLE, TABLE
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.plan import ShardPlan
from gemma_neuron.sharding.memory import ITEM_BYTES, parameter_count, weight_bytes
from gemma_neuron.sharding.placement import place

SHARD_BASE_BYTES = 192 * 2**20
"""Interpreter, libraries and tables of a `shard` process: 150 to 175 MiB of anonymous memory were measured (torch
2.13, demo model and a 3 GB slice). Nothing of it grows with the model but its list of tensors."""
SHARD_CHUNKS = 4
"""Pieces of `CHUNK_BYTES` alive at once while a tensor is cut: read, rearranged, hashed, written."""
COMPILER_BASE_BYTES = 2**30
"""Of a neuronx-cc process, whatever it compiles. An allowance: no published figure tells it."""
COMPILER_BYTES_PER_WEIGHT_BYTE = 1.4
"""neuronx-cc over a decode graph: 7.5 GB resident were reported for E2B on one core, whose graph reads 4.55 GB of
bfloat16 weights (github.com/xbill9/tpu-jax-inf2, runs/2026-07-30-neuron-compile-e2b). Weights are parameters of the
graph: it is the instructions that stream them which take the memory. That graph also unpacked 4-bit weights, which
makes this a cautious figure."""
COMPILER_DOUBLING_TOKENS = 2048
"""Tokens of a prefill bucket that add a decode graph's memory once more. Two runs of the 31B at tp 4 on 128 GiB bound
it: 8,192 tokens compiled, so it is at least 1,540, and 16,384 did not, so it is at most 3,090
(neuronx-distributed-inference, pull request 106)."""
CPU_COMPILER_BASE_BYTES = 800 * 2**20
CPU_COMPILER_LAYER_BYTES = 20 * 2**20
"""One process of the cpu back end's compiler with its C++ compiler, resident. Measured were at most 868 MiB with 6
layers, 1,000 with 12, 1,146 with 24 and 1,903 with 60 (a tiny Gemma 4 at tp 8, torch 2.13). Weights are untouched
pages there, widths only literals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeaks:
    """Predicted peaks of anonymous memory, in bytes. `compilers`: one process each, by unit, largest first."""

    all_ranks_float32: int
    one_rank_float32: int
    streamed: int
    compilers: tuple[tuple[str, int], ...]
    budget: int
    origin: str
    """Where the budget comes from, for people."""

    @property
    def at_once(self) -> int:
        """How many of the compilers fit the budget together, the largest first; at least one."""
        return at_once([count for _, count in self.compilers], self.budget)

    @property
    def compiling(self) -> int:
        """Peak of `compile`: as many compilers at once as fit."""
        return sum(count for _, count in self.compilers[: self.at_once])

    def to_json(self) -> dict[str, Any]:
        return {
            "shard": self.streamed,
            "compile": max(self.streamed, self.compiling),
            "all_ranks_float32": self.all_ranks_float32,
            "one_rank_float32": self.one_rank_float32,
            "streamed_bfloat16": self.streamed,
            "compiler_process": self.compilers[0][1],
            "compilers": dict(self.compilers),
            "compilers_at_once": self.at_once,
            "budget": self.budget,
            "budget_from": self.origin,
        }


def at_once(peaks: Sequence[int], budget: int) -> int:
    """How many processes of these peaks fit `budget` together, the largest first; at least one."""
    total, count = 0, 0
    for peak in sorted(peaks, reverse=True):
        total += peak
        if total > budget:
            break
        count += 1
    return max(1, count)


def host_peaks(
    geometry: ModelGeometry,
    table: ParameterTable,
    plan: ShardPlan,
    units: Sequence[UnitSpec],
    *,
    budget: int,
    origin: str,
) -> HostPeaks:
    """The four ways for one plan on Neuron."""
    whole = parameter_count(plan) * ITEM_BYTES["float32"]
    rank = usual_rank_bytes(geometry, table, plan.tp)
    compilers = [(unit.name, neuron_compiler_bytes(geometry, plan, unit)) for unit in units]
    return HostPeaks(
        # Every rank's process has its model, the one that started them has the checkpoint they are cut from.
        all_ranks_float32=whole + plan.tp * rank,
        # The checkpoint, the model that is traced, and the rank being cut out to be written.
        one_rank_float32=whole + 2 * rank,
        streamed=streamed_bytes(),
        compilers=tuple(sorted(compilers, key=lambda pair: -pair[1])),
        budget=budget,
        origin=origin,
    )


def usual_rank_bytes(geometry: ModelGeometry, table: ParameterTable, tp: int) -> int:
    """Float32 bytes of a rank as the usual tools lay it out: layers whose KV heads do not divide are whole on
    every rank, and so is the head's table. 13.42 GB in bfloat16 for the 31B at tp 8, as its 108 GB port shows."""
    plan = place(geometry, table, tp, "replicate-global")
    head = next(p for p in plan.parameters if p.name == TABLE)
    return weight_bytes(plan, "float32") + ITEM_BYTES["float32"] * (
        prod(head.shape) - prod(head.local_shape)
    )


def streamed_bytes() -> int:
    """Peak of our `shard`: a process and some pieces, whatever the model."""
    return SHARD_BASE_BYTES + SHARD_CHUNKS * CHUNK_BYTES


def neuron_compiler_bytes(geometry: ModelGeometry, plan: ShardPlan, unit: UnitSpec) -> int:
    """Peak of one neuronx-cc process. A stated basis of three published runs, no promise."""
    item = ITEM_BYTES["bfloat16"]
    looked_up = {PER_LAYER_TABLE} if geometry.tied else {PER_LAYER_TABLE, TABLE}
    streamed = sum(prod(p.local_shape) for p in plan.parameters if p.name not in looked_up) * item
    tokens = unit.batch * unit.length if unit.phase in ("prefill", "score") else 0
    growth = 1 + tokens / COMPILER_DOUBLING_TOKENS
    return COMPILER_BASE_BYTES + int(COMPILER_BYTES_PER_WEIGHT_BYTE * streamed * growth)


def cpu_compiler_bytes(geometry: ModelGeometry) -> int:
    """Peak of one compile process of the cpu back end."""
    return CPU_COMPILER_BASE_BYTES + len(geometry.layers) * CPU_COMPILER_LAYER_BYTES


def require_host_memory(peaks: HostPeaks, units: Sequence[UnitSpec]) -> None:
    """Raise DoesNotFitError when sharding or the largest compiler alone passes the budget."""
    if peaks.streamed > peaks.budget:
        raise DoesNotFitError(
            f"Sharding takes about {peaks.streamed:,} bytes of host memory; {peaks.budget:,} may be used "
            f"({peaks.origin}).",
            "Use a machine with more memory, or give --host-memory if more is free than that.",
        )
    _require_compilers(peaks.compilers, units, peaks.budget, peaks.origin, spare_host=True)


def compilers_at_once(
    backend: str,
    geometry: ModelGeometry,
    plan: ShardPlan,
    units: Sequence[UnitSpec],
    *,
    budget: int,
    origin: str,
) -> int:
    """How many units `compile` may build together here. Raises DoesNotFitError when one alone passes the budget."""
    neuron = backend == "neuron"
    peaks = {
        unit.name: neuron_compiler_bytes(geometry, plan, unit)
        if neuron
        else cpu_compiler_bytes(geometry)
        for unit in units
    }
    largest_first = sorted(peaks.items(), key=lambda pair: -pair[1])
    _require_compilers(largest_first, units, budget, origin, spare_host=neuron)
    return at_once(list(peaks.values()), budget)


def _require_compilers(
    compilers: Sequence[tuple[str, int]],
    units: Sequence[UnitSpec],
    budget: int,
    origin: str,
    *,
    spare_host: bool,
) -> None:
    name, largest = compilers[0]
    if largest <= budget:
        return
    fitting = {unit for unit, count in compilers if count <= budget}
    prefills = [u.length for u in units if u.phase == "prefill" and u.name in fitting]
    ways = [f"leave out the longer --buckets ({max(prefills)} fits)"] if prefills else []
    ways += ["raise --tp"] if spare_host and not prefills else []
    elsewhere = ", which needs no accelerator" if spare_host else ""
    ways.append(f"compile on a host with {largest / 1e9:.1f} GB to spare{elsewhere}")
    hint = ", or ".join(ways)
    raise DoesNotFitError(
        f"Compiling {name} takes about {largest:,} bytes of host memory in one process; {budget:,} may be used "
        f"({origin}).",
        f"{hint[0].upper()}{hint[1:]}; --host-memory says how much a host has.",
    )
