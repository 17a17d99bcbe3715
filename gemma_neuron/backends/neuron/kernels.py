"""Attention and KV writes in the forms that lower to few plain operations.

The stock attention kernels stop at head_dim 128 (Gemma 4 has 256 and 512), so attention is two products and a
softmax. Indices stay int32: an int64 index would bring 64-bit iotas into the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MASKED = -3.0e38
"""Finite, near bfloat16's and float32's smallest: an infinity can become NaN in a transpose on this hardware."""


class NeuronKernels:
    """See `models.kernels.Kernels` for shapes.

    `rows`: gives int32 [max_context] 0, 1, …, a weight of the graph. `torch.arange` would become a literal of as many
    numbers in every layer that asks for it.
    """

    def __init__(self, rows: Callable[[], Tensor]) -> None:
        self._rows = rows

    def for_layer(self, replicated: bool) -> NeuronKernels:
        return self

    def iota(self, length: int) -> Tensor:
        return self._rows()[:length]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
    ) -> Tensor:
        """Query heads of one KV head become rows of one product: K and V are never repeated."""
        group = query.shape[1] // key.shape[1]
        rows = query.unflatten(1, (-1, group)).flatten(2, 3)
        seen = visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
        scores = torch.matmul(rows, key.transpose(2, 3)).float() * scale
        scores = torch.where(seen, scores, torch.full_like(scores, MASKED))
        weights = torch.softmax(scores, dim=-1).type_as(value)
        heads: Tensor = torch.matmul(weights, value).unflatten(2, (group, -1)).flatten(1, 2)
        return heads

    def write_token(self, state: Tensor, slots: Tensor, at: Tensor, token: Tensor) -> Tensor:
        """A scatter along the sequence; it relies on decode's rule that row b is slot b."""
        index = self._index(state, slots, at)
        return state.scatter(2, index, token[:, :, None])

    def read_token(self, state: Tensor, slots: Tensor, at: Tensor) -> Tensor:
        return state.gather(2, self._index(state, slots, at))[:, :, 0]

    def write_rows(self, state: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """One select over the slots for each row (prefill and score have one)."""
        held = self.iota(state.shape[0])
        for b in range(rows.shape[0]):
            mine = (held == slots[b : b + 1])[:, None, None, None]
            state = torch.where(mine, rows[b : b + 1], state)
        return state

    def read_rows(self, state: Tensor, slots: Tensor) -> Tensor:
        return state.index_select(0, slots)

    def _index(self, state: Tensor, slots: Tensor, at: Tensor) -> Tensor:
        """int32 [B, K, 1, D]. `at` is read through `slots`: an input that one graph ignores is no parameter of it."""
        column = at.index_select(0, slots)[:, None, None, None]
        return column.expand(-1, state.shape[1], -1, state.shape[3])
