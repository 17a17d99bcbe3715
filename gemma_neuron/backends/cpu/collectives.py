"""Collectives over ranks that live on one axis: `torch.func.vmap` maps the rank axis, and these custom ops'
vmap rules are the real sum and concatenation over it. Their results have no rank axis any more, so
what follows is computed once, not once a rank.

`torch.export` records the ops; decomposition applies the rules, so compiled code holds plain sums and views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gemma_neuron::all_reduce", mutates_args=())
def _all_reduce(partial: Tensor) -> Tensor:
    return partial.clone()


@_all_reduce.register_fake
def _(partial: Tensor) -> Tensor:
    return torch.empty_like(partial)


@torch.library.custom_op("gemma_neuron::all_gather", mutates_args=())
def _all_gather(part: Tensor) -> Tensor:
    return part.clone()


@_all_gather.register_fake
def _(part: Tensor) -> Tensor:
    return torch.empty_like(part)


def _sum_over_ranks(info: Any, in_dims: tuple[int | None], partial: Tensor) -> tuple[Tensor, None]:
    assert in_dims[0] is not None, "an all-reduce of a value every rank already agrees on"
    return partial.sum(in_dims[0]), None


def _join_ranks(info: Any, in_dims: tuple[int | None], part: Tensor) -> tuple[Tensor, None]:
    assert in_dims[0] is not None, "an all-gather of a value every rank already agrees on"
    return part.movedim(in_dims[0], -2).flatten(-2), None


torch.library.register_vmap("gemma_neuron::all_reduce", _sum_over_ranks)
torch.library.register_vmap("gemma_neuron::all_gather", _join_ranks)


class MappedRanks:
    """Collectives for model code that runs under `vmap` over the rank axis."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        result: Tensor = _all_reduce(partial)
        return result

    def all_gather(self, part: Tensor) -> Tensor:
        result: Tensor = _all_gather(part)
        return result
