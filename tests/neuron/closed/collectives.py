"""`torch_xla.core.xla_model`'s collectives as NxD calls them (parallel_layers/comm.py)."""

from __future__ import annotations

import json

import torch

from tests.neuron.closed import graph

assert graph.COLLECTIVES  # importing it defines the operators below
Groups = list[list[int]]


def all_reduce(
    reduce_type: str, inputs: list[torch.Tensor], *, groups: Groups, pin_layout: bool
) -> list[torch.Tensor]:
    """In place, as for a list in torch_xla: the tensors handed in become the sums."""
    assert reduce_type == "sum" and isinstance(inputs, list)
    for tensor in inputs:
        tensor.copy_(torch.ops.standin.all_reduce(tensor, json.dumps(groups)))
    return inputs


def all_gather(
    value: torch.Tensor, *, dim: int, groups: Groups, output: None, pin_layout: bool
) -> torch.Tensor:
    """`pin_layout` True would pad by the tracing process's own rank, which is then in the graph for all."""
    assert not pin_layout, "rank baked into the graph"
    joined: torch.Tensor = torch.ops.standin.all_gather(value, dim, json.dumps(groups))
    return joined
