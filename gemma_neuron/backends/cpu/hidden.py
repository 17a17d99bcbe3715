"""Hidden states of a port by layer: its model code run uncompiled on this host, from its rank files, all ranks at once.

Compiled graphs return logits only. In: a port of any back end, token ids. Out: each layer's output. What a compiler
did to a graph does not show here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gemma_neuron.backends.cpu.ranks import AllRanks, Tensors, empty_state
from gemma_neuron.backends.cpu.runner import load_weights
from gemma_neuron.backends.tensors import TORCH_DTYPES
from gemma_neuron.models.view import RankView, rank_view

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gemma_neuron.plan import ShardPlan
    from gemma_neuron.port import Port


def hidden_states(port: Port, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Each decoder layer's output over one text from position 0, float32 [n, E], in the layers' order.

    Reads the rank files anew, beside what a loaded runner holds. Raises IntegrityError when one is not what was
    committed.
    """
    count = len(tokens)
    view = rank_view(port.geometry, port.plan, replace(port.spec, slots=1, max_context=count))
    state = empty_state(port.plan, view, TORCH_DTYPES[port.spec.dtype])
    module = _EveryLayer(port.plan, view, load_weights(port), state)
    row = torch.tensor([list(tokens)], dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)[None]
    slot, length = torch.zeros(1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    with torch.inference_mode():
        found = module(row, positions, slot, length)
    for hidden in found:
        yield hidden[0].float().numpy()


class _EveryLayer(AllRanks):
    """`AllRanks` whose outputs are its layers' instead of logits."""

    def __init__(self, plan: ShardPlan, view: RankView, weights: Tensors, state: Tensors) -> None:
        super().__init__(plan, view, weights, state)
        core = self._core[0]
        found: list[Tensor] = []

        def keep(layer: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> None:
            found.append(outputs[0])

        def instead(
            module: nn.Module, inputs: Any, outputs: tuple[Any, Any]
        ) -> tuple[tuple[Tensor, ...], Any]:
            return tuple(found), outputs[1]

        for layer in core.layers:
            layer.register_forward_hook(keep)
        core.register_forward_hook(instead)
