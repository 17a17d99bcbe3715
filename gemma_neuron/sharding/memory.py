"""Bytes per rank: weights, KV cache, scratch. Arithmetic over a plan; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gemma_neuron.backends.base import SCORE_LENGTH
from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.instances import Instance
from gemma_neuron.models.view import state_length
from gemma_neuron.plan import ITEM_BYTES, LayerPlan, ShardPlan

KEY_AND_VALUE = 2
SCRATCH_ROWS = 8
"""Activations alive at once in a layer, in widths of its widest row: residual, norm, gate, up, their product,
query, output, mask."""
RUNTIME_RESERVE_BYTES = 2**30
"""Held back per core: 96 MB of microcode (Neuron's documentation), the code and DMA rings of the graphs (0.3 GB were
reported for a decode graph of E2B, whose weights were unpacked in it), and the collectives' buffers. A stated basis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one rank holds on its core."""

    weights: int
    kv: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch


def rank_bytes(
    geometry: ModelGeometry,
    plan: ShardPlan,
    context: int,
    slots: int,
    buckets: tuple[int, ...],
    dtype: str,
) -> RankBytes:
    """Everything one rank holds on its core, but for the runtime's reserve."""
    return RankBytes(
        weights=weight_bytes(plan, dtype),
        kv=kv_bytes_per_rank(geometry, plan, context, slots, dtype),
        scratch=scratch_bytes(geometry, plan, context, slots, buckets, dtype),
    )


def room(instance: Instance) -> int:
    """Bytes of a core's HBM that a port may fill."""
    return instance.hbm_bytes_per_core - RUNTIME_RESERVE_BYTES


def weight_bytes(plan: ShardPlan, dtype: str) -> int:
    """Bytes of one rank's weights in `dtype`; derived tensors in their own."""
    return sum(p.rank_bytes(dtype) for p in plan.parameters)


def parameter_count(plan: ShardPlan) -> int:
    """Numbers in the checkpoint's text tensors, the tied table counted once, buffers left out."""
    return sum(prod(p.shape) for p in plan.parameters if not p.derived and not p.buffer)


def state_bytes(
    geometry: ModelGeometry,
    layer: LayerGeometry,
    planned: LayerPlan,
    context: int,
    slots: int,
    dtype: str,
) -> int:
    """KV state one layer reads on one rank, its own or a lent one: windowed in sliding layers."""
    heads = planned.kv_heads_per_rank * layer.head_dim * ITEM_BYTES[dtype]
    return KEY_AND_VALUE * slots * heads * state_length(geometry, layer, context)


def kv_bytes_per_rank(
    geometry: ModelGeometry, plan: ShardPlan, context: int, slots: int, dtype: str
) -> int:
    """KV state of one rank; layers that borrow K/V keep none."""
    return sum(
        state_bytes(geometry, layer, planned, context, slots, dtype)
        for layer, planned in zip(geometry.layers, plan.layers, strict=True)
        if layer.kv_donor is None
    )


def kv_bytes_total(geometry: ModelGeometry, context: int, slots: int, dtype: str) -> int:
    """KV state of the unsharded model, windowed."""
    return sum(
        KEY_AND_VALUE
        * slots
        * layer.kv_heads
        * layer.head_dim
        * state_length(geometry, layer, context)
        * ITEM_BYTES[dtype]
        for layer in geometry.layers
        if layer.kv_donor is None
    )


def scratch_bytes(
    geometry: ModelGeometry,
    plan: ShardPlan,
    context: int,
    slots: int,
    buckets: tuple[int, ...],
    dtype: str,
) -> int:
    """What the hungriest graph of a port holds beside weights and KV state, on one rank.

    Activations of the widest layer; attention's float32 scores over the longest state, since heads of 256 and 512
    pass no fused kernel there; every expert's intermediate and output; float32 logits gathered over the ranks.
    A stated basis, not a measurement: the compiler may keep less at a time.
    """
    item, columns = ITEM_BYTES[dtype], max(*buckets, slots)
    widths = {p.name: p.local_shape for p in plan.parameters}
    widest = max(
        geometry.hidden,
        len(geometry.layers) * geometry.per_layer_input,
        *(shape[0] for name, shape in widths.items() if name.endswith("gate_proj.weight")),
    )
    scores = max(
        planned.query_heads_per_rank * (state_length(geometry, layer, context) + columns)
        for layer, planned in zip(geometry.layers, plan.layers, strict=True)
    )
    logits = max(slots, min(SCORE_LENGTH, context)) * geometry.vocab
    total = columns * (SCRATCH_ROWS * widest * item + scores * ITEM_BYTES["float32"])
    if geometry.experts is not None:
        local = widths["layers.0.experts.down_proj"][2]
        total += columns * geometry.experts.experts * (3 * local + geometry.hidden) * item
    return total + logits * ITEM_BYTES["float32"]
