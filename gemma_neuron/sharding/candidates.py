"""What a plan was asked and what it answers: the candidates side by side, and what decides between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from gemma_neuron.backends.base import Dtype
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import Instance
from gemma_neuron.plan import ShardPlan
from gemma_neuron.sharding.compile_time import CompileTime
from gemma_neuron.sharding.host_memory import HostPeaks
from gemma_neuron.sharding.idle import IdleUse
from gemma_neuron.sharding.memory import (
    RUNTIME_RESERVE_BYTES,
    RankBytes,
    kv_bytes_total,
    parameter_count,
)
from gemma_neuron.sharding.roofline import DecodeSpeed, basis

StrategyChoice = Literal["auto", "replicate-global", "replicate-kv"]
PLAN_DTYPE: Dtype = "bfloat16"
"""What a port on Neuron computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What `plan` was asked. `host_budget`: bytes of host memory that may be used, from `host_origin`."""

    instance: Instance
    tp: int
    context: int
    slots: int
    buckets: tuple[int, ...]
    strategy: StrategyChoice
    host_budget: int
    host_origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy with its price on the instance. `reasons`: what it does where heads do not divide, and its cost."""

    plan: ShardPlan
    bytes: RankBytes
    fits: bool
    speed: DecodeSpeed
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.plan.strategy,
            "fits": self.fits,
            "weight_bytes_per_rank": self.bytes.weights,
            "kv_bytes_per_rank": self.bytes.kv,
            "scratch_bytes_per_rank": self.bytes.scratch,
            "total_bytes_per_rank": self.bytes.total,
            "decode_tokens_per_second": self.speed.to_json(),
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What `plan` answers. `decision`: why the chosen candidate is chosen."""

    geometry: ModelGeometry
    asked: PlanRequest
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    decision: str
    host: HostPeaks
    idle_uses: tuple[IdleUse, ...]
    compile_time: CompileTime
    notes: tuple[str, ...]

    @property
    def idle_cores(self) -> int:
        return self.asked.instance.cores - self.chosen.plan.tp

    def to_json(self) -> dict[str, Any]:
        """The `plan` fields of the JSON contract."""
        plan, asked = self.chosen.plan, self.asked
        return {
            "chosen": plan.strategy,
            "decision": self.decision,
            "tp": plan.tp,
            "instance": asked.instance.name,
            "max_context": asked.context,
            "slots": asked.slots,
            "buckets": list(asked.buckets),
            "dtype": PLAN_DTYPE,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "runtime_reserve_bytes_per_rank": RUNTIME_RESERVE_BYTES,
            "hbm_bytes_per_rank": asked.instance.hbm_bytes_per_core,
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
            "kv_bytes_total": kv_bytes_total(self.geometry, asked.context, asked.slots, PLAN_DTYPE),
            "decode_basis": basis(self.geometry),
            "host_peak_bytes": self.host.to_json(),
            "idle_cores": self.idle_cores,
            "idle_core_uses": [asdict(use) for use in self.idle_uses],
            "compile_time": self.compile_time.to_json(),
            "notes": list(self.notes),
        }
