"""Parallel state and the mapping functions (trace/parallel_context.py, parallel_layers/mappings.py)."""

from __future__ import annotations

from typing import Any

import torch

from tests.neuron.closed import collectives
from tests.neuron.closed.install import platform_target
from tests.neuron.nxd.recorded import recorded

_group: list[int] = []
"""Ranks of the tensor parallel group; empty outside a parallel state."""


@recorded("trace.parallel_context:NxDParallelState")
class NxDParallelState:
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        lnc_size: int | None = None,
    ) -> None:
        self.world_size, self.size = world_size, tensor_model_parallel_size

    def __enter__(self) -> NxDParallelState:
        platform_target()
        if self.world_size % self.size:
            raise RuntimeError(f"world_size {self.world_size} is not divisible by {self.size}")
        _group[:] = range(self.size)
        return self

    def __exit__(self, *error: object) -> None:
        _group.clear()


def _ranks() -> list[list[int]]:
    assert _group, "tensor model parallel group is not initialized"
    return [list(_group)]


@recorded("parallel_layers.mappings:reduce_from_tensor_model_parallel_region")
def reduce(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    groups = _ranks()
    if len(groups[0]) == 1:
        return input_
    return collectives.all_reduce("sum", [input_], groups=groups, pin_layout=True)[0]


@recorded("parallel_layers.mappings:gather_from_tensor_model_parallel_region_with_dim")
def gather(input_: torch.Tensor, gather_dim: int, process_group: Any = None) -> torch.Tensor:
    groups = _ranks()
    if len(groups[0]) == 1:
        return input_
    moved = input_.transpose(0, gather_dim)
    joined = collectives.all_gather(moved, dim=0, groups=groups, output=None, pin_layout=False)
    return joined.contiguous().transpose(0, gather_dim)
