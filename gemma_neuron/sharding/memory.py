"""Bytes per rank: weights, KV cache, scratch. Arithmetic over a plan; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.view import state_length
from gemma_neuron.plan import ShardPlan

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float16": 2, "int32": 4}
KEY_AND_VALUE = 2
SCRATCH_ROWS = 8
"""Activations alive at once in a layer, in widths of its widest row: residual, norm, gate, up, their
product, query, output, logits part. A stated basis, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one rank holds on its core."""

    weights: int
    kv: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch


def weight_bytes(plan: ShardPlan, dtype: str) -> int:
    """Bytes of one rank's weights in `dtype`; derived tensors in their own."""
    return sum(
        prod(p.local_shape) * ITEM_BYTES[p.dtype if p.dtype is not None else dtype]
        for p in plan.parameters
    )


def parameter_count(plan: ShardPlan) -> int:
    """Numbers in the checkpoint's text tensors, the tied table counted once, buffers left out."""
    return sum(prod(p.shape) for p in plan.parameters if not p.derived and not p.buffer)


def kv_bytes_per_rank(
    geometry: ModelGeometry, plan: ShardPlan, context: int, slots: int, dtype: str
) -> int:
    """KV state of one rank: windowed in sliding layers, none in layers that borrow K/V."""
    return sum(
        KEY_AND_VALUE
        * slots
        * planned.kv_heads_per_rank
        * layer.head_dim
        * state_length(geometry, layer, context)
        * ITEM_BYTES[dtype]
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


def scratch_bytes(geometry: ModelGeometry, plan: ShardPlan, columns: int, dtype: str) -> int:
    """Activations of the widest layer at the longest bucket, and the float32 logits of one position."""
    widest = max(
        geometry.hidden,
        *(p.local_shape[0] for p in plan.parameters if p.name.endswith("gate_proj.weight")),
    )
    logits = geometry.vocab * ITEM_BYTES["float32"]
    return SCRATCH_ROWS * widest * columns * ITEM_BYTES[dtype] + logits
