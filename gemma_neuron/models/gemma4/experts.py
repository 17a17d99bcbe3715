"""The sparse branch of 26B-A4B: a router over 128 experts, the 8 best of which add to a token.

Every expert lies on every rank, cut by width, and every expert is computed and weighted, zero where it was not
chosen: shapes stay static, as a tracer needs them. Facts: stock transformers 5.24, Gemma4TextRouter and
Gemma4TextExperts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemma_neuron.collectives import Collectives
from gemma_neuron.geometry import ExpertGeometry
from gemma_neuron.models.blocks import linear, normalised


class Router(nn.Module):
    """Weights of the experts for each token, from the raw residual."""

    def __init__(self, hidden: int, experts: ExpertGeometry, norm_eps: float) -> None:
        super().__init__()
        self.proj = linear(hidden, experts.experts)
        self.scale = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(experts.experts), requires_grad=False)
        self.top_k, self.norm_eps, self.root = experts.top_k, norm_eps, hidden**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, E] → float32 [B, L, experts], zero for all but the `top_k` best."""
        scaled = normalised(x, self.norm_eps).type_as(x) * self.scale * self.root
        chances = functional.softmax(self.proj(scaled), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(chances, self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        dense = torch.zeros_like(chances).scatter(-1, chosen, weights)
        scaled_by_expert: Tensor = dense * self.per_expert_scale
        return scaled_by_expert


class Experts(nn.Module):
    """All experts' gated MLPs, their widths cut over the ranks. `width` is a rank's."""

    def __init__(self, hidden: int, experts: int, width: int, collectives: Collectives) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(experts, 2 * width, hidden), requires_grad=False
        )
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width), requires_grad=False)
        self.collectives = collectives

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, L, E], weights [B, L, experts] → [B, L, E], summed over experts and ranks."""
        tokens = x.flatten(0, 1)
        both = torch.einsum("td,xfd->xtf", tokens, self.gate_up_proj)
        gate, up = both.chunk(2, dim=-1)
        inner = functional.gelu(gate, approximate="tanh") * up
        each = torch.einsum("xtf,xdf->xtd", inner, self.down_proj)
        share = weights.flatten(0, 1).transpose(0, 1)[..., None]
        total = (each * share).sum(0).type_as(x)
        joined: Tensor = self.collectives.all_reduce(total).unflatten(0, x.shape[:2])
        return joined
