"""Lay a model over ranks each way that is valid, price the ways, choose one. Pure, no torch.

In: geometry, parameter table, instance, tp, context, slots. Out: `Planned` with the chosen `ShardPlan` and all
candidates side by side. Refused: a tp that cannot be (exit 4), a context the model or the core cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from gemma_neuron.errors import DoesNotFitError, UsageError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import Instance
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.plan import ShardPlan, Strategy
from gemma_neuron.sharding.memory import (
    RankBytes,
    kv_bytes_per_rank,
    kv_bytes_total,
    parameter_count,
    scratch_bytes,
    weight_bytes,
)
from gemma_neuron.sharding.placement import place

StrategyChoice = Literal["auto", "replicate-global", "replicate-kv"]
RUNTIME_RESERVE_BYTES = 2**30
"""Held back per core for the runtime, compiled code and collectives' buffers; a stated basis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy with its price on the instance."""

    plan: ShardPlan
    bytes: RankBytes
    fits: bool
    bound_tokens_per_second: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What `plan` answers."""

    geometry: ModelGeometry
    instance: Instance
    context: int
    slots: int
    dtype: str
    chosen: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def idle_cores(self) -> int:
        return self.instance.cores - self.chosen.plan.tp

    def to_json(self) -> dict[str, Any]:
        """The `plan` fields of the JSON contract."""
        plan = self.chosen.plan
        return {
            "chosen": plan.strategy,
            "tp": plan.tp,
            "instance": self.instance.name,
            "max_context": self.context,
            "slots": self.slots,
            "dtype": self.dtype,
            "candidates": [_candidate_json(c) for c in self.candidates],
            "layers": [
                {
                    "index": layer.index,
                    "kind": layer.kind,
                    "placement": layer.placement,
                    "query_heads_per_rank": layer.query_heads_per_rank,
                    "kv_heads_per_rank": layer.kv_heads_per_rank,
                    "head_dim": layer.head_dim,
                }
                for layer in plan.layers
            ],
            "parameters": parameter_count(plan),
            "kv_bytes_total": kv_bytes_total(self.geometry, self.context, self.slots, self.dtype),
            "idle_cores": self.idle_cores,
        }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.plan.strategy,
        "fits": candidate.fits,
        "weight_bytes_per_rank": candidate.bytes.weights,
        "kv_bytes_per_rank": candidate.bytes.kv,
        "scratch_bytes_per_rank": candidate.bytes.scratch,
        "total_bytes_per_rank": candidate.bytes.total,
        # No expectation is given until it is calibrated on published runs.
        "decode_tokens_per_second": {
            "bound": round(candidate.bound_tokens_per_second, 1),
            "expected": None,
        },
        "reasons": list(candidate.reasons),
    }


def layout(
    geometry: ModelGeometry, table: ParameterTable, tp: int, strategy: StrategyChoice, dtype: str
) -> ShardPlan:
    """The plan alone, for stages that have no instance: `auto` takes the fewest weight bytes a rank."""
    plans = [place(geometry, table, tp, name) for name in strategies(strategy)]
    return min(plans, key=lambda plan: weight_bytes(plan, dtype))


def strategies(choice: str) -> tuple[Strategy, ...]:
    """The strategies a choice stands for. Raises UsageError for an unknown one."""
    known = get_args(Strategy)
    if choice != "auto" and choice not in known:
        raise UsageError(
            f"There is no strategy {choice!r}; there are auto, {', '.join(known)}.",
            "Leave --strategy out for the cheapest valid one.",
        )
    # replicate-kv first: where nothing has to be replicated both are the same plan.
    return ("replicate-kv", "replicate-global") if choice == "auto" else (cast(Strategy, choice),)


def make_plan(
    geometry: ModelGeometry,
    table: ParameterTable,
    *,
    instance: Instance,
    tp: int,
    context: int,
    slots: int,
    buckets: tuple[int, ...],
    strategy: StrategyChoice,
) -> Planned:
    """All candidates and the chosen one. Raises IndivisibleError or DoesNotFitError."""
    if tp > instance.cores:
        raise DoesNotFitError(
            f"tp {tp} needs {tp} NeuronCores; {instance.name} has {instance.cores}.",
            f"Use --tp {max(n for n in instance.tp_possible)} or less, or a larger --instance.",
        )
    dtype = "bfloat16"
    strategies(strategy)
    candidates = tuple(
        _priced(
            geometry, place(geometry, table, tp, name), instance, context, slots, buckets, dtype
        )
        for name in strategies("auto")
    )
    allowed = [c for c in candidates if c.plan.strategy in strategies(strategy)]
    chosen = min(allowed, key=lambda c: (not c.fits, c.bytes.total))
    if not chosen.fits:
        raise DoesNotFitError(
            f"{chosen.plan.strategy} at tp {tp} needs {chosen.bytes.total:,} bytes a core "
            f"({chosen.bytes.weights:,} weights, {chosen.bytes.kv:,} KV cache for {slots} slots of "
            f"{context}, {chosen.bytes.scratch:,} scratch); {instance.name} has "
            f"{instance.hbm_bytes_per_core - RUNTIME_RESERVE_BYTES:,} after the runtime's reserve.",
            "Lower --max-context or --slots, or raise --tp.",
        )
    return Planned(
        geometry=geometry,
        instance=instance,
        context=context,
        slots=slots,
        dtype=dtype,
        chosen=chosen,
        candidates=candidates,
    )


def _priced(
    geometry: ModelGeometry,
    plan: ShardPlan,
    instance: Instance,
    context: int,
    slots: int,
    buckets: tuple[int, ...],
    dtype: str,
) -> Candidate:
    used = RankBytes(
        weights=weight_bytes(plan, dtype),
        kv=kv_bytes_per_rank(geometry, plan, context, slots, dtype),
        scratch=scratch_bytes(geometry, plan, max(buckets), dtype),
    )
    room = instance.hbm_bytes_per_core - RUNTIME_RESERVE_BYTES
    per_second = instance.hbm_gib_s_per_core * 2**30
    one_slot = kv_bytes_per_rank(geometry, plan, context, 1, dtype)
    return Candidate(
        plan=plan,
        bytes=used,
        fits=used.total <= room,
        bound_tokens_per_second=per_second / (used.weights + one_slot),
        reasons=plan.reasons,
    )
