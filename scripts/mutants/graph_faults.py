"""Faults in the graphs: each changes one line of the model code, or one number it is built from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn import functional

from gemma_neuron.backends import graph_runner
from gemma_neuron.backends.cpu.collectives import MappedRanks
from gemma_neuron.backends.cpu.kernels import CpuKernels
from gemma_neuron.models import blocks, decoder
from gemma_neuron.models.blocks import Attention, GatedMLP, RMSNorm, Step
from gemma_neuron.models.gemma3.model import Gemma3Layer
from gemma_neuron.models.gemma4.model import Gemma4Layer
from gemma_neuron.models.layer import SandwichLayer
from scripts.mutants.base import graph

if TYPE_CHECKING:
    from gemma_neuron.port import Port

CORRUPT_FROM = 512


def _geometry(port: Port, **changes: Any) -> None:
    """The runner is built from another geometry than the checkpoint has."""
    port.__dict__["geometry"] = replace(port.geometry, **changes)


# --- rotary ---------------------------------------------------------------------------------------------------------


@graph("rope turns neighbouring pairs, not halves")
def interleaved(patch: MonkeyPatch, port: Port) -> None:
    def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = tables
        half = x.shape[-1] // 2
        first, second = x[..., 0::2], x[..., 1::2]
        c, s = cos[..., :half], sin[..., :half]
        return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)

    patch.setattr(blocks, "rotate", rotate)


@graph("rope turns the other way")
def backwards(patch: MonkeyPatch, port: Port) -> None:
    whole = blocks.rotate
    patch.setattr(blocks, "rotate", lambda x, tables: whole(x, (tables[0], -tables[1])))


@graph("keys are stored without rotation")
def unrotated_keys(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._key_value

    def key_value(self: Attention, x: Tensor, tables: Any) -> Any:
        still = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        return own(self, x, still)

    patch.setattr(Attention, "_key_value", key_value)


@graph("positions of a chunk start at its padding")
def padded_positions(patch: MonkeyPatch, port: Port) -> None:
    own = graph_runner._row

    def row(unit: Any, tokens: Any, slot: int, start: int) -> Any:
        padded, positions, slots, lengths = own(unit, tokens, slot, start)
        if start == 0:
            positions[:, : len(tokens)] += unit.length - len(tokens)
        return padded, positions, slots, lengths

    patch.setattr(graph_runner, "_row", row)


@graph("decode is one position late")
def late_decode(patch: MonkeyPatch, port: Port) -> None:
    own = decoder.rotary_tables

    def tables(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Any:
        late = positions + 1 if positions.shape[1] == 1 else positions
        return own(late, inv_freq, dtype)

    patch.setattr(decoder, "rotary_tables", tables)


# --- window and state -----------------------------------------------------------------------------------------------


@graph("window one too long")
def long_window(patch: MonkeyPatch, port: Port) -> None:
    _geometry(port, window=port.geometry.window + 1)


@graph("window one too short")
def short_window(patch: MonkeyPatch, port: Port) -> None:
    _geometry(port, window=port.geometry.window - 1)


@graph("window ignored")
def no_window(patch: MonkeyPatch, port: Port) -> None:
    _geometry(port, window=port.spec.max_context)


@graph("ring frozen once it is full")
def frozen_ring(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(blocks, "modulo", lambda x, length: torch.clamp(x, max=length - 1))


@graph("ring wraps one row late")
def late_wrap(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._decode

    def decode(self: Attention, key: Tensor, value: Tensor, step: Step, states: Any) -> Any:
        length = self.layer.state_length
        wrapped = torch.where(step.positions >= length, step.positions + 1, step.positions)
        return own(self, key, value, replace(step, positions=wrapped), states)

    patch.setattr(Attention, "_decode", decode)


@graph("a new sequence sees what its slot held")
def slot_leak(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._visible_sliding

    def visible(self: Attention, step: Step) -> Tensor:
        seen = own(self, step)
        seen[..., : self.layer.state_length] = True
        return seen

    def prefill(self: Attention, key: Tensor, value: Tensor, step: Step, states: Any) -> Any:
        new, seen = {}, []
        for name, chunk in ((self._key_state, key), (self._value_state, value)):
            held = self.kernels.read_rows(states[name], step.slots)
            rows = self._merged(held, chunk, step)
            seen.append(torch.cat([held, chunk], 2) if self._sliding else rows)
            new[name] = self.kernels.write_rows(states[name], step.slots, rows)
        return new, tuple(seen)

    patch.setattr(Attention, "_visible_sliding", visible)
    patch.setattr(Attention, "_prefill", prefill)


@graph("decode writes into the next slot")
def wrong_slot(patch: MonkeyPatch, port: Port) -> None:
    own = CpuKernels.write_token

    def write(self: CpuKernels, state: Tensor, slots: Tensor, at: Tensor, token: Tensor) -> Tensor:
        return own(self, state, (slots + 1) % state.shape[0], at, token)

    patch.setattr(CpuKernels, "write_token", write)


@graph("idle slots are written too")
def idle_written(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._decode

    def decode(self: Attention, key: Tensor, value: Tensor, step: Step, states: Any) -> Any:
        return own(self, key, value, replace(step, lengths=torch.ones_like(step.lengths)), states)

    patch.setattr(Attention, "_decode", decode)


@graph("padding is attended")
def padding_attended(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._visible_sliding

    def visible(self: Attention, step: Step) -> Tensor:
        whole = torch.full_like(step.lengths, step.positions.shape[1])
        return own(self, replace(step, lengths=whole))

    patch.setattr(Attention, "_visible_sliding", visible)


@graph("padding is written into the state")
def padding_written(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._merged

    def merged(self: Attention, old: Tensor, chunk: Tensor, step: Step) -> Tensor:
        return own(
            self, old, chunk, replace(step, lengths=torch.full_like(step.lengths, chunk.shape[2]))
        )

    patch.setattr(Attention, "_merged", merged)


@graph("prefill sees one token ahead")
def sees_ahead(patch: MonkeyPatch, port: Port) -> None:
    own = Attention._visible_global

    def visible(self: Attention, step: Step) -> Tensor:
        return own(self, replace(step, positions=step.positions + 1))

    patch.setattr(Attention, "_visible_global", visible)


@graph("the last real token is one early")
def early_last(patch: MonkeyPatch, port: Port) -> None:
    own = decoder._last_real
    patch.setattr(decoder, "_last_real", lambda x, lengths: own(x, (lengths - 1).clamp(min=1)))


@graph("wrong only from position 512 on")
def wrong_late(patch: MonkeyPatch, port: Port) -> None:
    own = Attention.forward

    def attention(self: Attention, x: Tensor, step: Step, states: Any, lent: Any) -> Any:
        output, new = own(self, x, step, states, lent)
        late = (step.positions >= CORRUPT_FROM)[..., None]
        return torch.where(late, output * 0.5, output), new

    patch.setattr(Attention, "forward", attention)


# --- arithmetic -----------------------------------------------------------------------------------------------------


@graph("soft-cap missing", "gemma4")
def no_softcap(patch: MonkeyPatch, port: Port) -> None:
    _geometry(port, softcap=None)


@graph("embedding scale missing")
def no_scale(patch: MonkeyPatch, port: Port) -> None:
    patch.setattr(decoder, "rounded", lambda factor, dtype: 1.0)


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
    _geometry(port, attention_scale=usual if abs(usual - own) > 1e-6 else usual * 2**0.5)


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


@graph("an output is the ranks' mean, not their sum")
def averaged(patch: MonkeyPatch, port: Port) -> None:
    own, parts = GatedMLP.forward, port.plan.tp
    patch.setattr(GatedMLP, "forward", lambda self, x: own(self, x) / parts)


@graph("tied table copied, and the copy is stale")
def stale_head(patch: MonkeyPatch, port: Port) -> None:
    own = decoder.Decoder._logits

    def logits(self: decoder.Decoder, x: Tensor) -> Tensor:
        noise = torch.cos(torch.arange(x.shape[-1], dtype=torch.float32) * 12.9898) * 0.2
        return own(self, x * (1 + noise).to(x.dtype))

    patch.setattr(decoder.Decoder, "_logits", logits)
