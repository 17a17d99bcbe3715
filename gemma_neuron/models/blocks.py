"""Modules Gemma's layers are made of, for one rank, with rank-local shapes.

Axes in shape comments: B rows, L columns (tokens), E hidden, H query heads, K KV heads, D head_dim,
S keys, N slots. No module knows its rank: where partial results must join, it calls `collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemma_neuron.collectives import Collectives
from gemma_neuron.models.kernels import Kernels
from gemma_neuron.models.rotary import rotate
from gemma_neuron.models.view import RankLayer, state_name

States = dict[str, Tensor]


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


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
    and `visible` per layer kind are computed once and shared by the layers.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor
    rotary: dict[str, tuple[Tensor, Tensor]]

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
    return newest - torch.remainder(newest - index, length)


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
        self.k_proj = linear(hidden, layer.kv_heads * d)
        self.v_proj = None if layer.geometry.value_is_key else linear(hidden, layer.kv_heads * d)
        self.o_proj = linear(layer.query_heads * d, hidden)
        self.q_norm = RMSNorm(d, norm_eps, norm_offset)
        self.k_norm = RMSNorm(d, norm_eps, norm_offset)
        self.value_norm, self.norm_eps = value_norm, norm_eps
        self.collectives, self.kernels = collectives, kernels

    def forward(self, x: Tensor, step: Step, states: States) -> tuple[Tensor, States]:
        """x [B, L, E] → (output [B, L, E], this layer's new state)."""
        tables = step.rotary[self.layer.geometry.kind]
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), tables)
        raw_key = self._heads(self.k_proj(x))
        # k_eq_v: V is K before its norm and rotation.
        value = raw_key if self.v_proj is None else self._heads(self.v_proj(x))
        if self.value_norm:
            value = normalised(value, self.norm_eps).type_as(value)
        key = rotate(self.k_norm(raw_key), tables)
        attend = self._decode if x.shape[1] == 1 else self._prefill
        joined, new = attend(query, key, value, step, states)
        output = self.o_proj(joined.transpose(1, 2).flatten(2))
        return (output if self.layer.replicated else self.collectives.all_reduce(output)), new

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads · D] → [B, heads, L, D]."""
        split: Tensor = x.unflatten(-1, (-1, self.layer.geometry.head_dim))
        return split.transpose(1, 2)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, step: Step, states: States
    ) -> tuple[Tensor, States]:
        """One token per slot (row b is slot b): write it, then attend over the whole state."""
        length = self.layer.state_length
        new: States = {}
        at = torch.remainder(step.positions[:, 0], length)
        real = (step.lengths > 0)[:, None, None]
        for part, token in (("key", key), ("value", value)):
            name = state_name(self.layer.geometry.index, part)
            old = self.kernels.read_token(states[name], step.slots, at)
            kept = torch.where(real, token[:, :, 0], old)
            new[name] = self.kernels.write_token(states[name], step.slots, at, kept)
        held = held_position(step.positions, self.kernels.iota(length)[None], length)
        visible = (held >= 0)[:, None, None]
        keys, values = self._own(new)
        return self.kernels.attention(query, keys, values, visible, self.scale), new

    def _prefill(
        self, query: Tensor, key: Tensor, value: Tensor, step: Step, states: States
    ) -> tuple[Tensor, States]:
        """A chunk of tokens: sliding layers see the old ring and the chunk, global ones the new state."""
        new: States = {}
        seen: States = {}
        for part, chunk in (("key", key), ("value", value)):
            name = state_name(self.layer.geometry.index, part)
            old = self.kernels.read_rows(states[name], step.slots)
            rows = self._merged(old, chunk, step)
            new[name] = self.kernels.write_rows(states[name], step.slots, rows)
            seen[name] = torch.cat([old, chunk], 2) if self._sliding else rows
        visible = self._visible_sliding(step) if self._sliding else self._visible_global(step)
        keys, values = self._own(seen)
        return self.kernels.attention(query, keys, values, visible, self.scale), new

    def _own(self, states: States) -> tuple[Tensor, Tensor]:
        index = self.layer.geometry.index
        return states[state_name(index, "key")], states[state_name(index, "value")]

    @property
    def _sliding(self) -> bool:
        return self.layer.geometry.kind == "sliding"

    def _merged(self, old: Tensor, chunk: Tensor, step: Step) -> Tensor:
        """State rows after the chunk, [B, K, S, D]: each row's newest position from chunk or before.

        A gather, not a scatter: a chunk longer than the ring would write rows twice, and padding must
        not be written at all.
        """
        length, columns = self.layer.state_length, chunk.shape[2]
        held = held_position(step.last, self.kernels.iota(length)[None], length)
        column = held - step.start
        from_chunk = (column >= 0) & (column < step.lengths[:, None])
        index = column.clamp(0, columns - 1).to(torch.int64)[:, None, :, None]
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
        return torch.cat([before, inside | itself], dim=-1)[:, None]


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
        found = functional.embedding(local.clamp(0, rows - 1), self.weight)
        return self.collectives.all_reduce(
            torch.where(mine[..., None], found, torch.zeros_like(found))
        )
