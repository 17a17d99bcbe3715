"""Attention and KV writes in the forms that AOTInductor compiles well for the CPU.

Writes use adjacent advanced indices on a transposed view: `state[rows, :, at]` breaks under vmap, and a
`where` over the whole state rewrites it all (measured: reference notes of the cpu prototype).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Query heads of one KV head become rows of one product: repeating K and V instead would copy the
    whole state each step."""
    group = query.shape[1] // key.shape[1]
    rows = query.unflatten(1, (-1, group)).flatten(2, 3)
    seen = visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    joined: Tensor = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=seen, scale=scale
    )
    heads: Tensor = joined.unflatten(2, (group, -1)).flatten(1, 2)
    return heads


@torch.library.custom_op("gemma_neuron::attention", mutates_args=())
def _mapped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> Tensor:
    return _attention(query, key, value, visible, scale)


@_mapped_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    return torch.empty_like(query)


def _attention_of_all_ranks(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, int]:
    """Ranks become more heads of one call: torch's own rule would run one call a rank."""
    ranks = info.batch_size
    assert in_dims[3] is None, "visibility depends on positions, never on a rank"

    def heads(x: Tensor, axis: int | None) -> Tensor:
        assert axis is not None, "a sharded layer's heads differ per rank"
        return x.movedim(axis, 1).flatten(1, 2)

    folded = [heads(x, axis) for x, axis in zip((query, key, value), in_dims[:3], strict=True)]
    joined = _attention(folded[0], folded[1], folded[2], visible, scale)
    return joined.unflatten(1, (ranks, -1)), 1


torch.library.register_vmap("gemma_neuron::attention", _attention_of_all_ranks)


class CpuKernels:
    """See `models.kernels.Kernels` for shapes."""

    def for_layer(self, replicated: bool) -> CpuKernels:
        return CpuKernels() if replicated else self

    def iota(self, length: int) -> Tensor:
        return torch.arange(length, dtype=torch.int32)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
    ) -> Tensor:
        return _attention(query, key, value, visible, scale)

    def write_token(self, state: Tensor, slots: Tensor, at: Tensor, token: Tensor) -> Tensor:
        by_row = state.transpose(1, 2)
        return by_row.index_put((slots, at), token).transpose(1, 2)

    def read_token(self, state: Tensor, slots: Tensor, at: Tensor) -> Tensor:
        return state.transpose(1, 2)[slots, at]

    def write_rows(self, state: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        return state.index_put((slots,), rows)

    def read_rows(self, state: Tensor, slots: Tensor) -> Tensor:
        return state.index_select(0, slots)


class MappedKernels(CpuKernels):
    """Kernels of sharded layers under `vmap`."""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
    ) -> Tensor:
        result: Tensor = _mapped_attention(query, key, value, visible, scale)
        return result
