"""What one rank's model looks like: local head counts, widths and KV state shapes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from gemma_neuron.backends.base import CompileSpec
from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.models.weights import TABLE
from gemma_neuron.plan import LayerPlan, ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayer:
    """One layer on one rank. `state_length`: KV rows, the ring's for sliding layers."""

    geometry: LayerGeometry
    query_heads: int
    kv_heads: int
    replicated: bool
    """The whole attention is computed on every rank: its output needs no all-reduce."""
    intermediate: int
    state_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """A rank's model, all that `models/*/model.py` needs to be built."""

    geometry: ModelGeometry
    layers: tuple[RankLayer, ...]
    vocab: int
    """Rows of the embedding table on this rank."""
    slots: int
    parameters: dict[str, tuple[int, ...]]
    """Name → shape on a rank, in the order of the plan."""

    def state_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """KV state name → [slots, kv_heads, length, head_dim], the same in every graph of a port."""
        shapes = {}
        for layer in self.layers:
            if layer.geometry.kv_donor is None:
                shape = (self.slots, layer.kv_heads, layer.state_length, layer.geometry.head_dim)
                for part in ("key", "value"):
                    shapes[state_name(layer.geometry.index, part)] = shape
        return shapes


def state_name(layer: int, part: str) -> str:
    """Name of a layer's KV state; `part` is key or value."""
    return f"state.{layer}.{part}"


def rank_view(geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec) -> RankView:
    """The view all ranks share: they differ in weights only."""
    local = {p.name: p.local_shape for p in plan.parameters}
    return RankView(
        geometry=geometry,
        layers=tuple(
            _rank_layer(geometry, layer, planned, spec.max_context, local)
            for layer, planned in zip(geometry.layers, plan.layers, strict=True)
        ),
        vocab=local[TABLE][0],
        slots=spec.slots,
        parameters=local,
    )


def state_length(geometry: ModelGeometry, layer: LayerGeometry, max_context: int) -> int:
    """KV rows a layer keeps per sequence: a ring of window length, or the whole context."""
    return min(geometry.window, max_context) if layer.kind == "sliding" else max_context


def _rank_layer(
    geometry: ModelGeometry,
    layer: LayerGeometry,
    planned: LayerPlan,
    max_context: int,
    local: dict[str, tuple[int, ...]],
) -> RankLayer:
    return RankLayer(
        geometry=layer,
        query_heads=planned.query_heads_per_rank,
        kv_heads=planned.kv_heads_per_rank,
        replicated=planned.placement == "replicated",
        intermediate=local[f"layers.{layer.index}.mlp.gate_proj.weight"][0],
        state_length=state_length(geometry, layer, max_context),
    )
