"""A Gemma decoder for one rank, as a function of its tokens and its KV state.

    core(tokens, positions, slots, lengths, states, targets) -> (outputs, new_states)

In: int32 tensors (design section 2) and the state dict of `RankView.state_shapes`. Out: float32 outputs equal
on every rank, and every state's new value; nothing is written in place. Weights are parameters under the
checkpoint's names; nothing depends on a rank but the tensor `rank`.
"""

from __future__ import annotations

import importlib
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.blocks import (
    Lent,
    RMSNorm,
    States,
    Step,
    VocabParallelEmbedding,
    linear,
    rounded,
)
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.layer import SandwichLayer
from gemma_neuron.models.rotary import rotary_tables
from gemma_neuron.models.view import RankLayer, RankView


class Rope(nn.Module):
    """Holds one layer kind's frequencies: a weight written by the sharder, never a constant."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.inv_freq = nn.Parameter(torch.empty(head_dim // 2), requires_grad=False)


class Head(nn.Module):
    """An untied output table's rows on this rank."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden), requires_grad=False)


class Decoder(nn.Module):
    """Embedding, layers, final norm, vocabulary product and soft-cap."""

    def __init__(self, view: RankView, collectives: Collectives, kernels: Kernels) -> None:
        super().__init__()
        g = view.geometry
        family = importlib.import_module(f"gemma_neuron.models.{g.family}.model")
        self.view, self.collectives = view, collectives
        self.embed_tokens = VocabParallelEmbedding(view.vocab, g.hidden, collectives)
        self.layers = nn.ModuleList(
            family.LAYER(view, layer, collectives, kernels) for layer in view.layers
        )
        self.norm = RMSNorm(g.hidden, g.norm_eps, family.LAYER.norm_offset)
        if g.per_layer_input:
            rows, packed = view.parameters["embed_tokens_per_layer.weight"]
            self.embed_tokens_per_layer = VocabParallelEmbedding(rows, packed, collectives)
            self.per_layer_model_projection = linear(g.hidden, packed)
            self.per_layer_projection_norm = RMSNorm(
                g.per_layer_input, g.norm_eps, family.LAYER.norm_offset
            )
        self.lm_head = None if g.tied else Head(view.vocab, g.hidden)
        self.rope = nn.ModuleDict(
            {kind: Rope(_head_dim(view.layers, kind)) for kind in sorted(_kinds(view.layers))}
        )
        self.rank = nn.Parameter(torch.empty(1, dtype=torch.int32), requires_grad=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        states: States,
        targets: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], States]:
        """tokens, positions, targets int32 [B, L]; slots, lengths int32 [B].

        Without targets: (logits of the last real position [B, vocab],). With: (target log-probability
        [B, L], log-sum-exp [B, L], logits [B, L, vocab]). All float32.
        """
        x = self._embedded(tokens)
        step = Step(
            positions,
            slots,
            lengths,
            self._rotary(positions, x.dtype),
            self._per_layer_inputs(tokens, x) if self.view.geometry.per_layer_input else None,
        )
        new: States = {}
        lent: Lent = {}
        for layer in self.layers:
            x, changed = cast(SandwichLayer, layer)(x, step, states, lent)
            new |= changed
        if targets is None:
            return (self._logits(_last_real(x, lengths)),), new
        logits = self._logits(x)
        total = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets.to(torch.int64)[..., None])[..., 0]
        return (chosen - total, total, logits), new

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings [B, L, E]; the scale is rounded to the table's dtype as the reference does."""
        found = cast(Tensor, self.embed_tokens(tokens, self.rank))
        return found * rounded(self.view.geometry.embed_scale, found.dtype)

    def _per_layer_inputs(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[B, L, layers, width]: each layer's own look-up of the token, mixed with a projection of x."""
        width = self.view.geometry.per_layer_input
        found = self.embed_tokens_per_layer(tokens, self.rank)
        found = (found * rounded(width**0.5, found.dtype)).unflatten(-1, (-1, width))
        projected = self.per_layer_model_projection(x) * self.view.geometry.hidden**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, width)))
        mixed: Tensor = (projected + found) * 2.0**-0.5
        return mixed

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            kind: rotary_tables(positions, cast(Rope, rope).inv_freq, dtype)
            for kind, rope in self.rope.items()
        }

    def _logits(self, x: Tensor) -> Tensor:
        """x [..., E] → float32 [..., vocab], gathered over ranks, soft-capped in float32."""
        table = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        part = functional.linear(self.norm(x), table).float()
        cap = self.view.geometry.softcap
        if cap is not None:
            part = torch.tanh(part / cap) * cap
        return self.collectives.all_gather(part)


def _last_real(x: Tensor, lengths: Tensor) -> Tensor:
    """x [B, L, E] → each row's last real position, [B, E]; an empty row's first."""
    index = torch.maximum(lengths - 1, torch.zeros_like(lengths)).to(torch.int64)[:, None, None]
    return x.gather(1, index.expand(-1, 1, x.shape[2]))[:, 0]


def _kinds(layers: tuple[RankLayer, ...]) -> set[str]:
    return {layer.geometry.kind for layer in layers}


def _head_dim(layers: tuple[RankLayer, ...], kind: str) -> int:
    return next(layer.geometry.head_dim for layer in layers if layer.geometry.kind == kind)
