"""How fast decoding can be, and how fast it may be expected to be. Arithmetic over a plan; no torch.

The bound: a step must read every weight it touches and every sequence's KV state once, at the core's whole memory
bandwidth. The expectation: the bytes our graphs read over the share of the bandwidth that published runs reached,
plus a fixed time a layer (norms, small kernels, collectives). Its three constants are fitted to those runs by
`scripts/check-roofline` and lie with them in `data/decode_runs.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import Instance
from gemma_neuron.models.weights import PER_LAYER_TABLE, TABLE
from gemma_neuron.plan import ShardPlan
from gemma_neuron.sharding.memory import kv_bytes_per_rank, state_bytes

RUNS = "decode_runs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes one rank reads for one decode step over all slots."""

    must: int
    """What no implementation can leave out: of the experts, those one token needs; KV state once."""
    graph: int
    """What our graphs read: every expert, and a lent KV state once for each layer that borrows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Fitted to published runs. `efficiency`: share of the HBM bandwidth reached, per core generation."""

    efficiency: dict[str, float]
    layer_seconds: float
    spread: float
    """Nine of ten runs, each left out of the fit, lie within this factor of what the rest predicts."""
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """Tokens per second of one sequence while `slots` are decoded together; times `slots` in all."""

    slots: int
    bound: float
    expected: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """The contract's `bound` and `expected` are one sequence's."""
        return {
            "bound": round(self.bound, 1),
            "expected": round(self.expected, 1),
            "expected_low": round(self.low, 1),
            "expected_high": round(self.high, 1),
            "slots": self.slots,
            "total_bound": round(self.bound * self.slots, 1),
            "total_expected": round(self.expected * self.slots, 1),
        }


def step_bytes(
    geometry: ModelGeometry, plan: ShardPlan, context: int, slots: int, dtype: str
) -> StepBytes:
    """Bytes read in a step at the end of a `context`. A table is read by the row, unless it is the head too."""
    must = graph = 0
    for p in plan.parameters:
        count = p.rank_bytes(dtype)
        if p.name == PER_LAYER_TABLE or (p.name == TABLE and not geometry.tied):
            count = slots * (count // p.local_shape[0])
        graph += count
        if ".experts." in p.name:
            assert geometry.experts is not None
            count = count * geometry.experts.top_k // geometry.experts.experts
        must += count
    once = kv_bytes_per_rank(geometry, plan, context, slots, dtype)
    lent = sum(
        state_bytes(geometry, layer, planned, context, slots, dtype)
        for layer, planned in zip(geometry.layers, plan.layers, strict=True)
        if layer.kv_donor is not None
    )
    return StepBytes(must=must + once, graph=graph + once + lent)


def step_seconds(
    constants: Constants, neuroncore: str, bandwidth: float, count: float, layers: int
) -> float:
    """Expected seconds of a step that reads `count` bytes at `bandwidth` bytes/s through `layers` layers."""
    return count / (constants.efficiency[neuroncore] * bandwidth) + layers * constants.layer_seconds


def decode_speed(
    geometry: ModelGeometry,
    plan: ShardPlan,
    instance: Instance,
    context: int,
    slots: int,
    dtype: str,
) -> DecodeSpeed:
    """Bound and expectation of one rank, which is all ranks': they wait for each other in every layer."""
    read = step_bytes(geometry, plan, context, slots, dtype)
    fitted = constants()
    bandwidth = instance.hbm_bytes_s_per_core
    bound = bandwidth / read.must
    expected = 1 / step_seconds(
        fitted, instance.neuroncore, bandwidth, read.graph, len(geometry.layers)
    )
    return DecodeSpeed(
        slots=slots,
        bound=bound,
        expected=expected,
        low=expected / fitted.spread,
        high=min(bound, expected * fitted.spread),
    )


def basis(geometry: ModelGeometry) -> str:
    """What the expectation rests on, and what it does not rest on."""
    fitted = constants()
    text = (
        f"{fitted.runs} published runs on NeuronCores, 3 fitted constants; nine of ten runs, left out of the fit, lie "
        f"within a factor of {fitted.spread:.2f}. No Inferentia2 run at tp 8 has been published for any Gemma 4."
    )
    if geometry.experts is not None:
        text += (
            f" All {geometry.experts.experts} experts are read in a step, as our graphs do; the bound reads the "
            f"{geometry.experts.top_k} a token needs."
        )
    return text


@cache
def published() -> dict[str, Any]:
    """The calibration table as it lies in the package: models, runs, what was left out, constants."""
    text = resources.files("gemma_neuron.data").joinpath(RUNS).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def constants() -> Constants:
    """The constants stored with the runs."""
    stored = published()["constants"]
    return Constants(
        efficiency=stored["efficiency"],
        layer_seconds=stored["layer_seconds"],
        spread=stored["spread"],
        runs=len(published()["runs"]),
    )
