"""What a port takes of the host's memory: four ways of getting there, side by side. No torch.

Two of the ways are what was seen elsewhere and what this toolkit does not do; they stand beside ours so that nobody
sizes a machine by them, or tries them on one that is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.machine import how_many_fit
from gemma_neuron.models.weights import TABLE
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.plan import ITEM_BYTES, ShardPlan
from gemma_neuron.sharding.memory import parameter_count, weight_bytes
from gemma_neuron.sharding.piece_sizes import HOT_BYTES, PIECE_BYTES, PIECES, SCRATCH_BYTES
from gemma_neuron.sharding.placement import place

SHARD_BASE_BYTES = 224 * 2**20
"""Interpreter, libraries and tables of a `shard` process, and of the child that computes frequencies with torch: 215 to
250 MiB of anonymous memory were measured (torch 2.13, a 9 GB slice; pages that both share counted twice). Nothing of it
grows with the model but its list of tensors."""


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
        return how_many_fit([count for _, count in self.compilers], self.budget)

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


def host_peaks(
    geometry: ModelGeometry,
    table: ParameterTable,
    plan: ShardPlan,
    compilers: Sequence[tuple[str, int]],
    *,
    budget: int,
    origin: str,
) -> HostPeaks:
    """The four ways for one plan on Neuron. `compilers`: unit and peak, as the back end predicts it."""
    whole = parameter_count(plan) * ITEM_BYTES["float32"]
    rank = usual_rank_bytes(geometry, table, plan.tp)
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
    return SHARD_BASE_BYTES + PIECES * PIECE_BYTES + SCRATCH_BYTES + HOT_BYTES


def require_host_memory(peaks: HostPeaks, units: Sequence[UnitSpec]) -> None:
    """Raise DoesNotFitError when sharding or the largest compiler alone passes the budget."""
    if peaks.streamed > peaks.budget:
        raise DoesNotFitError(
            f"Sharding takes about {peaks.streamed:,} bytes of host memory; {peaks.budget:,} may be used "
            f"({peaks.origin}).",
            "Use a machine with more memory, or give --host-memory if more is free than that.",
        )
    require_compilers(peaks.compilers, units, peaks.budget, peaks.origin, spare_host=True)


def require_compilers(
    compilers: Sequence[tuple[str, int]],
    units: Sequence[UnitSpec],
    budget: int,
    origin: str,
    *,
    spare_host: bool,
) -> None:
    """Raise DoesNotFitError when one unit alone passes the budget. `compilers`: unit and predicted peak; `spare_host`:
    whether compiling needs no accelerator, and more of them makes graphs smaller."""
    name, largest = max(compilers, key=lambda pair: pair[1])
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
