"""Rotary position embedding: frequencies per layer kind, tables per position, rotation of halves.

Facts: stock transformers 5.24, `modeling_rope_utils` and the Gemma 3/4 rotary modules. The frequencies are
computed in float32 in the reference's order of operations, because at position 100,000 one unit in the
last place of a frequency is already a visible angle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemma_neuron.geometry import RopeGeometry


def inverse_frequencies(rope: RopeGeometry, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]; entry i turns the pair (i, i + head_dim / 2).

    `proportional` (Gemma 4 global layers): the first `rotated_fraction` of the entries are real with the
    whole head_dim in the denominator, the rest are zero, so those pairs never turn.
    """
    half = head_dim // 2
    real = int(rope.rotated_fraction * head_dim // 2) if rope.kind == "proportional" else half
    exponents = torch.arange(0, 2 * real, 2, dtype=torch.float32) / head_dim
    turning = 1.0 / (rope.theta**exponents)
    return torch.cat([turning, torch.zeros(half - real)]) / rope.factor


def rotary_tables(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [B, 1, L, head_dim] in `dtype`, computed in float32. positions [B, L]."""
    angles = positions.to(torch.float32)[:, None, :, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + D/2) of x [B, heads, L, D] by its position's angle."""
    cos, sin = tables
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
