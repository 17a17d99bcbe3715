"""The few operations whose best form differs per back end; the model calls them, the back end chooses.

Shapes: B rows, L columns, S keys, H query heads, K KV heads (H a multiple of K), D head_dim, N slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernels(Protocol):
    """Attention and KV writes. All are out of place; a shell writes new state back."""

    def for_layer(self, replicated: bool) -> Kernels:
        """The kernels of one layer: replicated layers have no rank axis where ranks share a process."""
        ...

    def iota(self, length: int) -> Tensor:
        """int32 [length]: 0, 1, …"""
        ...

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
    ) -> Tensor:
        """softmax(scale · query keyᵀ) value with the softmax in float32.

        query [B, H, L, D]; key, value [B, K, S, D]; visible bool [B, 1, L, S], at least one True a row.
        """
        ...

    def write_token(self, state: Tensor, slots: Tensor, at: Tensor, token: Tensor) -> Tensor:
        """state [N, K, S, D] with token [B, K, D] at row `at[b]` of slot `slots[b]`; slots distinct."""
        ...

    def read_token(self, state: Tensor, slots: Tensor, at: Tensor) -> Tensor:
        """[B, K, D]: what `write_token` would overwrite."""
        ...

    def write_rows(self, state: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """state [N, K, S, D] with the slots `slots` replaced by rows [B, K, S, D]; slots distinct."""
        ...

    def read_rows(self, state: Tensor, slots: Tensor) -> Tensor:
        """[B, K, S, D] of the slots `slots`."""
        ...
