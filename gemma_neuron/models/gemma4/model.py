"""Gemma 4's decoder layer: norms multiply by w, V is normed without weight, scores are not scaled, and
the layer's output is multiplied by `layer_scalar`.

Sizes differ by what stands beside the MLP: experts (26B-A4B) and per-layer embeddings (E2B, E4B).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.blocks import Lent, RMSNorm, States, Step, linear
from gemma_neuron.models.gemma4.experts import Experts, Router
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.layer import SandwichLayer
from gemma_neuron.models.view import RankLayer, RankView


class Gemma4Layer(SandwichLayer):
    """Attention and MLP, each between two norms, then what the size adds, then the layer's scalar."""

    norm_offset = 0.0
    value_norm = True

    def __init__(
        self, view: RankView, layer: RankLayer, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__(view, layer, collectives, kernels)
        g, self.index = view.geometry, layer.geometry.index
        # A buffer in stock transformers, a parameter here: tracers turn buffers into constants or state.
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.has_experts, self.has_per_layer_input = g.experts is not None, g.per_layer_input > 0
        if g.experts is not None:
            width = view.parameters[f"layers.{self.index}.experts.down_proj"][-1]
            self.router = Router(g.hidden, g.experts, g.norm_eps)
            self.experts = Experts(g.hidden, g.experts.experts, width, collectives)
            self.post_feedforward_layernorm_1 = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
            self.post_feedforward_layernorm_2 = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
            self.pre_feedforward_layernorm_2 = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
        if self.has_per_layer_input:
            self.per_layer_input_gate = linear(g.hidden, g.per_layer_input)
            self.per_layer_projection = linear(g.per_layer_input, g.hidden)
            self.post_per_layer_input_norm = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)

    def forward(self, x: Tensor, step: Step, states: States, lent: Lent) -> tuple[Tensor, States]:
        x, new = super().forward(x, step, states, lent)
        if self.has_per_layer_input:
            assert step.per_layer is not None
            gate = functional.gelu(self.per_layer_input_gate(x), approximate="tanh")
            added = self.per_layer_projection(gate * step.per_layer[:, :, self.index])
            x = x + self.post_per_layer_input_norm(added)
        return x * self.layer_scalar, new

    def fed_forward(self, x: Tensor) -> Tensor:
        """The dense MLP and, where the size has experts, the sparse branch beside it."""
        dense = super().fed_forward(x)
        if not self.has_experts:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x))
        first, second = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        both: Tensor = first(dense) + second(sparse)
        return both


LAYER = Gemma4Layer
