"""Who holds what: a placement per parameter and per layer, and what a rank's model looks like.

In: built by `sharding.planner` from geometry, parameter table, instance, tp. Out: `ShardPlan`, whose
`fingerprint` names it in a port. Shapes are never changed after planning: the model is built from
`RankLayer` and the local shapes here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from gemma_neuron.geometry import AttentionKind

Strategy = Literal["replicate-global", "replicate-kv"]
PlacementKind = Literal[
    "whole", "rows", "columns", "repeated-rows", "expert-gate-up", "expert-down", "rank"
]
LayerPlacement = Literal["sharded", "replicate-kv", "replicated"]


ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float16": 2, "int32": 4}
"""Bytes of a number, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one parameter is laid over the ranks.

    `rows`/`columns`: equal contiguous parts of dimension 0/1, part r on rank r. `repeated-rows`: dimension 0
    is cut into `parts` (< tp), part `r * parts // tp` on rank r. `whole`: all of it on every rank.
    `expert-gate-up`: dimension 1 holds two halves, each cut into `parts`; `expert-down`: dimension 2 is cut.
    `rank`: int32 [1] holding r.
    """

    kind: PlacementKind
    parts: int
    reason: str = ""

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape on one rank of a tensor whose whole shape is `shape`."""
        if self.kind in ("rows", "repeated-rows"):
            return (shape[0] // self.parts, *shape[1:])
        if self.kind in ("columns", "expert-gate-up"):
            return (shape[0], shape[1] // self.parts, *shape[2:])
        if self.kind == "expert-down":
            return (*shape[:2], shape[2] // self.parts)
        return shape

    def part_of_rank(self, rank: int, tp: int) -> int:
        """Which part rank `rank` of `tp` holds (0 for `whole`)."""
        if self.kind == "repeated-rows":
            return rank * self.parts // tp
        return 0 if self.kind in ("whole", "rank") else rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParameter:
    """One parameter with its placement; shapes are whole, `local_shape` is a rank's."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: Placement
    layer: int | None
    derived: bool
    dtype: str | None
    buffer: bool = False

    def rank_bytes(self, dtype: str) -> int:
        """Bytes of a rank's part in a graph of `dtype`; a derived tensor keeps its own."""
        return prod(self.local_shape) * ITEM_BYTES[dtype if self.dtype is None else self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer's attention on one rank. `replicated`: computed whole on every rank, no all-reduce."""

    index: int
    kind: AttentionKind
    placement: LayerPlacement
    query_heads_per_rank: int
    kv_heads_per_rank: int
    head_dim: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The whole layout at one tensor parallel degree."""

    tp: int
    strategy: Strategy
    layers: tuple[LayerPlan, ...]
    parameters: tuple[PlannedParameter, ...]
    reasons: tuple[str, ...] = field(default=())

    def fingerprint(self) -> str:
        """Hex digest of everything that decides a rank's bytes; reasons left out."""
        from blake3 import blake3

        facts = {
            "tp": self.tp,
            "layers": [
                [layer.placement, layer.query_heads_per_rank, layer.kv_heads_per_rank]
                for layer in self.layers
            ],
            "parameters": [
                [p.name, p.shape, p.placement.kind, p.placement.parts, p.dtype]
                for p in self.parameters
            ],
        }
        return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def parameter(self, name: str) -> PlannedParameter:
        return next(p for p in self.parameters if p.name == name)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
