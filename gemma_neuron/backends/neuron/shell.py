"""One rank's model as NxD's tracer wants it: weights as parameters, KV state as buffers that `forward` re-assigns.

The tracer finds state by re-assignment at the top level, so all state lives here and the core stays a
function. Parameters are made in the plan's local shapes and the graph's dtypes, without touching their memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gemma_neuron.backends.neuron.collectives import NxdRanks
from gemma_neuron.backends.neuron.kernels import NeuronKernels
from gemma_neuron.backends.tensors import flat, weight_dtype
from gemma_neuron.models.decoder import Decoder
from gemma_neuron.models.view import RankView
from gemma_neuron.plan import ShardPlan

CORE = "core."
"""What stands before a weight's name in the graph; the rank files have it without."""
ROWS = "rows"
"""The one weight that no rank file holds: int32 [max_context] 0, 1, …, made when a port is loaded."""


def row_numbers(max_context: int) -> Tensor:
    return torch.arange(max_context, dtype=torch.int32)


class RankShell(nn.Module):
    """forward(tokens, positions, slots, lengths, targets=None) of one rank; re-assigns its KV state."""

    def __init__(
        self, view: RankView, plan: ShardPlan, dtype: torch.dtype, max_context: int, mappings: Any
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            self.core = Decoder(view, NxdRanks(mappings), NeuronKernels(lambda: self.rows))
        for name, parameter in list(self.core.named_parameters()):
            owner, _, last = name.rpartition(".")
            blank = torch.empty(parameter.shape, dtype=weight_dtype(plan, name, dtype))
            setattr(self.core.get_submodule(owner), last, nn.Parameter(blank, requires_grad=False))
        self.rows = nn.Parameter(row_numbers(max_context), requires_grad=False)
        self.state_names = {name: flat(name) for name in view.state_shapes()}
        for name, shape in view.state_shapes().items():
            self.register_buffer(flat(name), torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        states = {name: getattr(self, own) for name, own in self.state_names.items()}
        outputs, new = self.core(tokens, positions, slots, lengths, states, targets)
        for name, value in new.items():
            setattr(self, self.state_names[name], value)
        result: tuple[Tensor, ...] = outputs
        return result
