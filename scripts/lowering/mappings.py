"""NxD's two mapping functions as its `parallel_layers/comm.py` calls torch_xla, where its source is not at hand."""

from __future__ import annotations

from typing import Any

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def world_of(ranks: int, rank: int) -> None:
    """Let torch_xla think it is one of `ranks` processes, as NxD does while it traces."""
    xr.world_size = lambda: ranks
    xr.global_ordinal = lambda: rank


class Mappings:
    """Over all ranks of a world; at one rank they do nothing."""

    def __init__(self, world: int) -> None:
        self.groups = [list(range(world))]

    def reduce_from_tensor_model_parallel_region(self, x: Any) -> Any:
        if len(self.groups[0]) == 1:
            return x
        return xm.all_reduce(xm.REDUCE_SUM, [x], groups=self.groups, pin_layout=True)[0]

    def gather_from_tensor_model_parallel_region_with_dim(self, x: Any, dim: int) -> Any:
        if len(self.groups[0]) == 1:
            return x
        moved = x.transpose(0, dim)
        joined = xm.all_gather(moved, dim=0, groups=self.groups, output=None, pin_layout=False)
        return joined.contiguous().transpose(0, dim)
