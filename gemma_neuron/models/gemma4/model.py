"""Gemma 4's decoder layer: norms multiply by w, V is normed without weight, scores are not scaled, and
the layer's output is multiplied by `layer_scalar`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.blocks import States, Step
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.layer import SandwichLayer
from gemma_neuron.models.view import RankLayer, RankView


class Gemma4Layer(SandwichLayer):
    """Attention and MLP, each between two norms, then the layer's scalar."""

    norm_offset = 0.0
    value_norm = True

    def __init__(
        self, view: RankView, layer: RankLayer, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__(view, layer, collectives, kernels)
        # A buffer in stock transformers, a parameter here: tracers turn buffers into constants or state.
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor, step: Step, states: States) -> tuple[Tensor, States]:
        x, new = super().forward(x, step, states)
        return x * self.layer_scalar, new


LAYER = Gemma4Layer
