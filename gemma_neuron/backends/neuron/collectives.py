"""Collectives over NxD's tensor parallel group.

NxD's all-reduce works in place, under lazy tracing too (the Python tensor is rebound to the sum), so that a
residual added afterwards would be added to itself: each input is a copy of its own. The copy costs nothing in
the traced graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class NxdRanks:
    """See `collectives.Collectives`. `mappings`: NxD's module of that name."""

    def __init__(self, mappings: Any) -> None:
        self._mappings = mappings

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Summed in float32, as NxD's own row-parallel layer does by default: a ring of bfloat16 sums would
        round once a hop."""
        whole: Tensor = self._mappings.reduce_from_tensor_model_parallel_region(
            partial.float().clone()
        )
        return whole.type_as(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        whole: Tensor = self._mappings.gather_from_tensor_model_parallel_region_with_dim(
            part, part.dim() - 1
        )
        return whole
