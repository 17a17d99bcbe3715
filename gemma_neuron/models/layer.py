"""The decoder layer every Gemma shares; a family's subclass states what differs."""

from __future__ import annotations

from torch import Tensor, nn

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.blocks import Attention, GatedMLP, Lent, RMSNorm, States, Step
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.view import RankLayer, RankView


class SandwichLayer(nn.Module):
    """Attention and MLP, each between two norms, each added to the residual."""

    norm_offset: float
    """What RMSNorm adds to its weight: 1 in Gemma 3, 0 in Gemma 4."""
    value_norm: bool
    """Whether V passes a weightless RMSNorm."""

    def __init__(
        self, view: RankView, layer: RankLayer, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__()
        g = view.geometry
        self.self_attn = Attention(
            g.hidden,
            layer,
            window=g.window,
            scale=g.attention_scale,
            norm_eps=g.norm_eps,
            norm_offset=self.norm_offset,
            value_norm=self.value_norm,
            collectives=collectives,
            kernels=kernels.for_layer(layer.replicated),
        )
        self.mlp = GatedMLP(g.hidden, layer.intermediate, collectives)
        self.input_layernorm = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
        self.post_attention_layernorm = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
        self.pre_feedforward_layernorm = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)
        self.post_feedforward_layernorm = RMSNorm(g.hidden, g.norm_eps, self.norm_offset)

    def forward(self, x: Tensor, step: Step, states: States, lent: Lent) -> tuple[Tensor, States]:
        """x [B, L, E] → (x after the layer, the layer's new KV state)."""
        attended, new = self.self_attn(self.input_layernorm(x), step, states, lent)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.fed_forward(x)), new

    def fed_forward(self, x: Tensor) -> Tensor:
        """The MLP's output before the norm that follows it; x is the residual."""
        output: Tensor = self.mlp(self.pre_feedforward_layernorm(x))
        return output
