"""Where ranks join: the protocol the model code calls, and its identity for one rank.

Back ends bring the others: `cpu` joins simulated ranks, `neuron` calls the SDK. The rank itself is
never a Python int in the model: it is a weight (`rank`, int32 [1]), so that one graph serves all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Protocol):
    """Sums and concatenations over the tensor parallel group."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of every rank's `partial`, same shape and dtype, on every rank."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's `part` side by side along the last dimension, in rank order."""
        ...


class Alone:
    """One rank: nothing to join."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part
