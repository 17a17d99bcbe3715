"""Faults in the graphs' arithmetic, and where ranks join: each changes one line of the model code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn import functional

from gemma_neuron.backends.cpu.collectives import MappedRanks
from gemma_neuron.models import blocks, decoder
from gemma_neuron.models.blocks import Attention, GatedMLP, RMSNorm, VocabParallelEmbedding
from gemma_neuron.models.gemma3.model import Gemma3Layer
from gemma_neuron.models.gemma4.model import Gemma4Layer
from gemma_neuron.models.layer import SandwichLayer
from scripts.mutants.base import built_with, graph

if TYPE_CHECKING:
    from gemma_neuron.port import Port


# --- arithmetic -----------------------------------------------------------------------------------------------------


@graph("soft-cap missing", "gemma4")
def no_softcap(patch: MonkeyPatch, port: Port) -> None:
    built_with(port, softcap=None)


@graph("embedding scale missing")
def no_scale(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(decoder, "rounded", lambda factor, dtype: 1.0)


# not the bundled model's: its square root of 128 keeps 11.3125 of 11.3137, 270M's of 640 only 25.25 of 25.298
@graph("embedding scale rounded to bfloat16 in a float32 port", "gemma3")
def rounded_scale(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(decoder, "rounded", lambda factor, dtype: blocks.rounded(factor, torch.bfloat16))


@graph("norm multiplies by 1 + w", "gemma4")
def one_plus(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(Gemma4Layer, "norm_offset", 1.0)


@graph("norm multiplies by w", "gemma3")
def plain_weight(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(Gemma3Layer, "norm_offset", 0.0)


@graph("scores scaled by another power of head_dim")
def wrong_scale(patch: MonkeyPatch, port: Port) -> None:
    usual = port.geometry.layers[0].head_dim ** -0.5
    own = port.geometry.attention_scale
    built_with(port, attention_scale=usual if abs(usual - own) > 1e-6 else usual * 2**0.5)


@graph("q_norm missing")
def no_query_norm(patch: MonkeyPatch, port: Port) -> None:
    own = Attention.__init__

    def init(self: Attention, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        norm = self.q_norm.forward
        patch.setattr(self.q_norm, "forward", lambda x: norm(x) * 0 + x)

    patch.setattr(Attention, "__init__", init)


@graph("V of k_eq_v layers taken after the norm", "gemma4")
def late_value(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._key_value

    def key_value(self: Attention, x: Tensor, tables: Any) -> Any:
        key, value = own(self, x, tables)
        return key, (self.k_norm(self._heads(self.k_proj(x))) if self.v_proj is None else value)

    patch.setattr(Attention, "_key_value", key_value)


@graph("v_norm missing", "gemma4")
def no_value_norm(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(Gemma4Layer, "value_norm", False)


@graph("post-attention norm missing in one layer")
def no_post_norm(patch: MonkeyPatch, port: Port) -> None:
    own = SandwichLayer.__init__

    def init(self: SandwichLayer, view: Any, layer: Any, *rest: Any) -> None:
        own(self, view, layer, *rest)
        if layer.geometry.index == 1:
            norm = self.post_attention_layernorm.forward
            patch.setattr(self.post_attention_layernorm, "forward", lambda x: norm(x) * 0 + x)

    patch.setattr(SandwichLayer, "__init__", init)


@graph("SiLU in place of GELU")
def silu(patch: MonkeyPatch, port: Port) -> None:
    def forward(self: GatedMLP, x: Tensor) -> Tensor:
        gate = functional.silu(self.gate_proj(x))
        return self.collectives.all_reduce(self.down_proj(gate * self.up_proj(x)))

    patch.setattr(GatedMLP, "forward", forward)


@graph("norm divides by the mean magnitude")
def mean_norm(patch: MonkeyPatch, port: Port) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        weight = self.weight.float()
        wide = x.float()
        scaled = wide / (wide.abs().mean(-1, keepdim=True) + self.eps)
        return (scaled * (self.offset + weight if self.offset else weight)).type_as(x)

    patch.setattr(RMSNorm, "forward", forward)


# --- ranks ----------------------------------------------------------------------------------------------------------


@graph("vocabulary parts joined in another rank order")
def gathered_backwards(patch: MonkeyPatch, port: Port) -> None:
    own = MappedRanks.all_gather
    parts = port.plan.tp

    def gather(self: MappedRanks, part: Tensor) -> Tensor:
        whole = own(self, part)
        return whole.unflatten(-1, (parts, -1)).flip(-2).flatten(-2)

    patch.setattr(MappedRanks, "all_gather", gather)


@graph("embeddings are the ranks' mean, not their sum")
def averaged(patch: MonkeyPatch, port: Port) -> None:
    own, parts = VocabParallelEmbedding.forward, port.plan.tp

    def forward(self: VocabParallelEmbedding, tokens: Tensor, rank: Tensor) -> Tensor:
        return own(self, tokens, rank) / parts

    patch.setattr(VocabParallelEmbedding, "forward", forward)


@graph("tied table copied, and the copy is stale")
def stale_head(patch: MonkeyPatch, port: Port) -> None:
    own = functional.linear

    def linear(x: Tensor, table: Tensor, *rest: Any) -> Tensor:
        wave = torch.cos(torch.arange(table.shape[-1], dtype=torch.float32) * 12.9898) * 0.2
        return own(x, table * (1 + wave).to(table.dtype), *rest)

    def logits(self: decoder.Decoder, x: Tensor) -> Tensor:
        with MonkeyPatch.context() as head:
            head.setattr(decoder.functional, "linear", linear)
            return product(self, x)

    product = decoder.Decoder._logits
    patch.setattr(decoder.Decoder, "_logits", logits)
