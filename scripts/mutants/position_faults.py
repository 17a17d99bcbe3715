"""Faults in the graphs' positions, masks and state: each changes one line of the model code, or one number of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from gemma_neuron.backends import graph_runner
from gemma_neuron.backends.cpu.kernels import CpuKernels
from gemma_neuron.models import blocks, decoder
from gemma_neuron.models.blocks import Attention, Step
from scripts.mutants.base import built_with, graph

if TYPE_CHECKING:
    from gemma_neuron.port import Port

LATE = 512
"""Where a public port went wrong, whatever its window."""


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
    built_with(port, window=port.geometry.window + 1)


@graph("window one too short")
def short_window(patch: MonkeyPatch, port: Port) -> None:
    built_with(port, window=port.geometry.window - 1)


@graph("window ignored")
def no_window(patch: MonkeyPatch, port: Port) -> None:
    built_with(port, window=port.spec.max_context)


@graph("ring frozen at its first rows")
def frozen_ring(patch: MonkeyPatch, port: Port) -> None:
    decode, merged = Attention._decode, Attention._merged

    def full_decode(self: Attention, key: Tensor, value: Tensor, step: Step, states: Any) -> Any:
        room = step.positions[:, 0] < self.layer.state_length
        return decode(self, key, value, replace(step, lengths=step.lengths * room), states)

    def full_merge(self: Attention, old: Tensor, chunk: Tensor, step: Step) -> Tensor:
        room = (self.layer.state_length - step.start[:, 0]).clamp(min=0)
        return merged(self, old, chunk, replace(step, lengths=torch.minimum(step.lengths, room)))

    patch.setattr(Attention, "_decode", full_decode)
    patch.setattr(Attention, "_merged", full_merge)


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
    row, visible_sliding, whole = graph_runner._row, Attention._visible_sliding, Attention._prefill
    used: set[int] = set()
    leaks = False

    def noted(unit: Any, tokens: Any, slot: int, start: int) -> Any:
        nonlocal leaks
        leaks = start == 0 and slot in used
        used.add(slot)
        return row(unit, tokens, slot, start)

    def visible(self: Attention, step: Step) -> Tensor:
        seen = visible_sliding(self, step)
        seen[..., : self.layer.state_length] |= leaks
        return seen

    def prefill(self: Attention, key: Tensor, value: Tensor, step: Step, states: Any) -> Any:
        new, seen = whole(self, key, value, step, states)
        if leaks and self._sliding:
            held = (states[self._key_state], states[self._value_state])
            old = [self.kernels.read_rows(state, step.slots) for state in held]
            pairs = zip(old, (key, value), strict=True)
            seen = tuple(torch.cat([rows, chunk], 2) for rows, chunk in pairs)
        return new, seen

    patch.setattr(graph_runner, "_row", noted)
    patch.setattr(Attention, "_visible_sliding", visible)
    patch.setattr(Attention, "_prefill", prefill)


@graph("a later chunk goes on from the next slot")
def next_slots_rows(patch: MonkeyPatch, port: Port) -> None:
    own = CpuKernels.read_rows

    def read(self: CpuKernels, state: Tensor, slots: Tensor) -> Tensor:
        return own(self, state, (slots + 1) % state.shape[0])

    patch.setattr(CpuKernels, "read_rows", read)


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


@graph("angles stand still from position 512 on")
def short_tables(patch: MonkeyPatch, port: Port) -> None:
    own = decoder.rotary_tables

    def tables(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Any:
        return own(positions.clamp(max=LATE - 1), inv_freq, dtype)

    patch.setattr(decoder, "rotary_tables", tables)


@graph("attention wrong only from position 512 on")
def wrong_late(patch: MonkeyPatch, port: Port) -> None:
    own = Attention.forward

    def attention(self: Attention, x: Tensor, step: Step, states: Any, lent: Any) -> Any:
        output, new = own(self, x, step, states, lent)
        late = (step.positions >= LATE)[..., None]
        return torch.where(late, output.flip(-1), output), new

    patch.setattr(Attention, "forward", attention)
