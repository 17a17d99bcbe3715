"""All ranks of one replica in one module: weights and KV state with a rank axis, mapped by `vmap`.

`AllRanks` is the shell of design section 2 for this back end: it owns weights and state as flat buffers at its
top level (torch.export loses re-assignments of nested ones) and copies the core's new state into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gemma_neuron.backends.cpu.collectives import MappedRanks
from gemma_neuron.backends.cpu.kernels import CpuKernels, MappedKernels
from gemma_neuron.backends.tensors import flat
from gemma_neuron.collectives import Alone
from gemma_neuron.models.decoder import Decoder
from gemma_neuron.models.view import RankView
from gemma_neuron.plan import ShardPlan

Tensors = dict[str, Tensor]


def rank_axes(plan: ShardPlan, view: RankView) -> dict[str, int | None]:
    """Name → axis of the ranks (0), or None where every rank holds the same, for weights and state."""
    one = plan.tp == 1
    axes: dict[str, int | None] = {
        p.name: None if one or p.placement.kind == "whole" else 0 for p in plan.parameters
    }
    replicated = {layer.geometry.index for layer in view.layers if layer.replicated}
    for name in view.state_shapes():
        axes[name] = None if one or int(name.split(".")[1]) in replicated else 0
    return axes


def stacked_shape(shape: tuple[int, ...], axis: int | None, tp: int) -> tuple[int, ...]:
    return shape if axis is None else (tp, *shape)


def empty_state(plan: ShardPlan, view: RankView, dtype: torch.dtype) -> Tensors:
    """Zeroed KV state, all ranks."""
    axes = rank_axes(plan, view)
    return {
        name: torch.zeros(stacked_shape(shape, axes[name], plan.tp), dtype=dtype)
        for name, shape in view.state_shapes().items()
    }


class AllRanks(nn.Module):
    """forward(tokens, positions, slots, lengths, targets=None) over all ranks; writes KV state in place."""

    def __init__(self, plan: ShardPlan, view: RankView, weights: Tensors, state: Tensors) -> None:
        super().__init__()
        alone = plan.tp == 1
        with torch.device("meta"):
            core = Decoder(
                view,
                Alone() if alone else MappedRanks(),
                CpuKernels() if alone else MappedKernels(),
            )
        self._core = [core]  # in a list: its meta parameters must not be this module's
        self.axes = rank_axes(plan, view)
        self.tp, self.weight_names, self.state_names = plan.tp, list(weights), list(state)
        expected = {name for name, _ in core.named_parameters()}
        assert expected == set(weights), sorted(expected ^ set(weights))[:6]
        for name, tensor in (weights | state).items():
            self.register_buffer(flat(name), tensor)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        def one_rank(weights: Tensors, state: Tensors) -> tuple[tuple[Tensor, ...], Tensors]:
            inputs = (tokens, positions, slots, lengths, state, targets)
            result: tuple[tuple[Tensor, ...], Tensors] = functional_call(
                self._core[0], weights, inputs
            )
            return result

        weights, state = self._tensors(self.weight_names), self._tensors(self.state_names)
        outputs, new = self._over_ranks(one_rank)(weights, state)
        for name, value in new.items():
            getattr(self, flat(name)).copy_(value)
        return outputs

    def _tensors(self, names: list[str]) -> Tensors:
        return {name: getattr(self, flat(name)) for name in names}

    def _over_ranks(
        self, one_rank: Callable[[Tensors, Tensors], tuple[tuple[Tensor, ...], Tensors]]
    ) -> Callable[[Tensors, Tensors], tuple[tuple[Tensor, ...], Tensors]]:
        """`one_rank` mapped over the rank axis; out_dims None proves that the ranks' outputs agree."""
        if self.tp == 1:
            return one_rank
        weight_axes = {name: self.axes[name] for name in self.weight_names}
        state_axes = {name: self.axes[name] for name in self.state_names}
        # vmap's annotation knows flat out_dims only; it takes any tree that matches the outputs.
        out_axes: Any = (None, state_axes)
        return vmap(one_rank, in_dims=(weight_axes, state_axes), out_dims=out_axes)
