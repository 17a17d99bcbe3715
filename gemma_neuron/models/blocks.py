"""Modules Gemma's layers are made of, for one rank, with rank-local shapes.

Axes in shape comments: B rows, L columns (tokens), E hidden, H query heads, K KV heads, D head_dim,
S keys, N slots. No module knows its rank: where partial results must join, it calls `collectives`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.rotary import rotate
from gemma_neuron.models.view import RankLayer, state_name

States = dict[str, Tensor]
Lent = dict[int, tuple[Tensor, Tensor]]
"""Layer index → the keys and values its attention saw this call: what borrowing layers read."""


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """`factor` as the reference holds it: rounded to the table's dtype (nearest, ties to even).

    On the number's bits: a tensor made here would become a constant of the graph.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (result,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(result)


class RMSNorm(nn.Module):
    """`normalised(x) * (offset + weight)` in float32, cast back. offset: 1 in Gemma 3, 0 in Gemma 4."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return (
            normalised(x, self.eps) * (self.offset + weight if self.offset else weight)
        ).type_as(x)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bias-free projection: Gemma has no other."""
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.requires_grad_(False)
    return layer


class GatedMLP(nn.Module):
    """tanh-GELU gated MLP; its width is split, so the ranks' outputs are summed."""

    def __init__(self, hidden: int, width: int, collectives: Collectives) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)
        self.collectives = collectives

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.collectives.all_reduce(self.down_proj(gate * self.up_proj(x)))


@dataclass(frozen=True, slots=True)
class Step:
    """One call's tokens: where they stand and which are real.

    positions int32 [B, L]; slots, lengths int32 [B]; columns at or past `lengths[b]` are padding. `rotary`
    per layer kind is computed once and shared by the layers.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor
    rotary: dict[str, tuple[Tensor, Tensor]]
    per_layer: Tensor | None = None
    """[B, L, layers, width]: per-layer inputs of the sizes that have them."""

    @property
    def start(self) -> Tensor:
        """Position of each row's first token, int32 [B, 1]."""
        return self.positions[:, :1]

    @property
    def last(self) -> Tensor:
        """Position of each row's last real token, int32 [B, 1]; start - 1 for an empty row."""
        return self.start + self.lengths[:, None] - 1


def held_position(newest: Tensor, index: Tensor, length: int) -> Tensor:
    """Position that row `index` of a ring of `length` holds when `newest` was written last.

    Negative: never written. With length = context (global layers) row j simply holds position j.
    """
    return newest - modulo(newest - index, length)


def modulo(x: Tensor, length: int) -> Tensor:
    """x mod length, never negative. For powers of two the low bits: 2 operations where `remainder` lowers to 22."""
    return x & (length - 1) if length & (length - 1) == 0 else torch.remainder(x, length)


class Attention(nn.Module):
    """Grouped-query attention over a layer's KV state, a ring of window length in sliding layers."""

    def __init__(  # noqa: PLR0913 - the facts in which families differ
        self,
        hidden: int,
        layer: RankLayer,
        *,
        window: int,
        scale: float,
        norm_eps: float,
        norm_offset: float,
        value_norm: bool,
        collectives: Collectives,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        d, self.layer, self.window, self.scale = layer.geometry.head_dim, layer, window, scale
        self.q_proj = linear(hidden, layer.query_heads * d)
        self.o_proj = linear(layer.query_heads * d, hidden)
        self.q_norm = RMSNorm(d, norm_eps, norm_offset)
        if layer.geometry.kv_donor is None:
            self.k_proj = linear(hidden, layer.kv_heads * d)
            own_value = not layer.geometry.value_is_key
            self.v_proj = linear(hidden, layer.kv_heads * d) if own_value else None
            self.k_norm = RMSNorm(d, norm_eps, norm_offset)
        self.value_norm, self.norm_eps = value_norm, norm_eps
        self.collectives, self.kernels = collectives, kernels

    def forward(self, x: Tensor, step: Step, states: States, lent: Lent) -> tuple[Tensor, States]:
        """x [B, L, E] → (output [B, L, E], this layer's new state); notes what it saw in `lent`."""
        geometry, decoding = self.layer.geometry, x.shape[1] == 1
        tables = step.rotary[geometry.kind]
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), tables)
        new: States = {}
        if geometry.kv_donor is None:
            key, value = self._key_value(x, tables)
            remember = self._decode if decoding else self._prefill
            new, lent[geometry.index] = remember(key, value, step, states)
        keys, values = lent[geometry.index if geometry.kv_donor is None else geometry.kv_donor]
        visible = self._visible(step, decoding)
        joined = self.kernels.attention(query, keys, values, visible, self.scale)
        output = self.o_proj(joined.transpose(1, 2).flatten(2))
        return (output if self.layer.replicated else self.collectives.all_reduce(output)), new

    def _key_value(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V, each [B, K, L, D]."""
        raw_key = self._heads(self.k_proj(x))
        # k_eq_v: V is K before its norm and rotation.
        value = raw_key if self.v_proj is None else self._heads(self.v_proj(x))
        if self.value_norm:
            value = normalised(value, self.norm_eps).type_as(value)
        return rotate(self.k_norm(raw_key), tables), value

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads · D] → [B, heads, L, D]."""
        split: Tensor = x.unflatten(-1, (-1, self.layer.geometry.head_dim))
        return split.transpose(1, 2)

    def _decode(
        self, key: Tensor, value: Tensor, step: Step, states: States
    ) -> tuple[States, tuple[Tensor, Tensor]]:
        """One token per slot (row b is slot b): write it; attention then sees the whole state."""
        at = modulo(step.positions[:, 0], self.layer.state_length)
        real = (step.lengths > 0)[:, None, None]

        def written(name: str, token: Tensor) -> Tensor:
            old = self.kernels.read_token(states[name], step.slots, at)
            kept = torch.where(real, token[:, :, 0], old)
            return self.kernels.write_token(states[name], step.slots, at, kept)

        keys, values = written(self._key_state, key), written(self._value_state, value)
        return {self._key_state: keys, self._value_state: values}, (keys, values)

    def _prefill(
        self, key: Tensor, value: Tensor, step: Step, states: States
    ) -> tuple[States, tuple[Tensor, Tensor]]:
        """A chunk of tokens: sliding layers see the old ring and the chunk, global ones the new state.

        A chunk at position 0 finds zeros: masked rows get weight 0, but 0 times a NaN that an earlier
        sequence left would still be NaN.
        """
        empty = step.lengths[:, None] < 1
        goes_on = torch.where(empty, torch.ones_like(step.start), step.start) > 0

        def written(name: str, chunk: Tensor) -> tuple[Tensor, Tensor]:
            held = self.kernels.read_rows(states[name], step.slots)
            old = torch.where(goes_on[:, :, None, None], held, torch.zeros_like(held))
            rows = self._merged(old, chunk, step)
            seen = torch.cat([old, chunk], 2) if self._sliding else rows
            return self.kernels.write_rows(states[name], step.slots, rows), seen

        new_key, keys = written(self._key_state, key)
        new_value, values = written(self._value_state, value)
        return {self._key_state: new_key, self._value_state: new_value}, (keys, values)

    @property
    def _key_state(self) -> str:
        return state_name(self.layer.geometry.index, "key")

    @property
    def _value_state(self) -> str:
        return state_name(self.layer.geometry.index, "value")

    def _visible(self, step: Step, decoding: bool) -> Tensor:
        """bool [B, 1, L, S]: which of the keys `lent` a token sees."""
        if decoding:
            length = self.layer.state_length
            held = held_position(step.positions, self.kernels.iota(length)[None], length)
            return (held >= 0)[:, None, None]
        return self._visible_sliding(step) if self._sliding else self._visible_global(step)

    @property
    def _sliding(self) -> bool:
        return self.layer.geometry.kind == "sliding"

    def _merged(self, old: Tensor, chunk: Tensor, step: Step) -> Tensor:
        """State rows after the chunk, [B, K, S, D]: each row's newest position from chunk or before.

        A gather, not a scatter: a chunk longer than the ring would write rows twice, and padding must
        not be written at all.
        """
        length = self.layer.state_length
        held = held_position(step.last, self.kernels.iota(length)[None], length)
        column = held - step.start
        from_chunk = (column >= 0) & (column < step.lengths[:, None])
        index = torch.where(from_chunk, column, torch.zeros_like(column))
        index = index.to(torch.int64)[:, None, :, None]
        picked = chunk.gather(2, index.expand(-1, chunk.shape[1], -1, chunk.shape[3]))
        return torch.where(from_chunk[:, None, :, None], picked, old)

    def _visible_global(self, step: Step) -> Tensor:
        """[B, 1, L, S]: state row j holds position j and is seen from j on."""
        rows = self.kernels.iota(self.layer.state_length)
        return (rows[None, None] <= step.positions[:, :, None])[:, None]

    def _visible_sliding(self, step: Step) -> Tensor:
        """[B, 1, L, ring + L]: positions of the last `window` tokens, the current one counted.

        A padding column is seen by itself alone: never by a real token, yet no row is empty.
        """
        asking = step.positions[:, :, None]
        held = held_position(
            step.start - 1,
            self.kernels.iota(self.layer.state_length)[None],
            self.layer.state_length,
        )[:, None]
        before = (held >= 0) & (held > asking - self.window)
        other = step.positions[:, None]
        columns = self.kernels.iota(step.positions.shape[1])
        real = (columns[None] < step.lengths[:, None])[:, None]
        inside = (other <= asking) & (other > asking - self.window) & real
        itself = (columns[:, None] == columns[None])[None]
        return torch.cat([before, torch.where(itself, itself, inside)], dim=-1)[:, None]


class VocabParallelEmbedding(nn.Module):
    """Rows of the table split over ranks; tokens of other ranks contribute zero to the sum."""

    def __init__(self, rows: int, width: int, collectives: Collectives) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)
        self.collectives = collectives

    def forward(self, tokens: Tensor, rank: Tensor) -> Tensor:
        """tokens int32 [B, L], rank int32 [1] → [B, L, width], unscaled."""
        rows = self.weight.shape[0]
        local = tokens - rank * rows
        mine = (local >= 0) & (local < rows)
        row = torch.where(mine, local, torch.zeros_like(local))
        found = functional.embedding(row, self.weight)
        return self.collectives.all_reduce(
            torch.where(mine[..., None], found, torch.zeros_like(found))
        )
