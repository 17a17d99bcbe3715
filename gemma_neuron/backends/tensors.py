"""Tensor facts that every back end's graphs share: dtypes, names of state, the inputs a unit is traced with."""

from __future__ import annotations

import torch
from torch import Tensor

from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.plan import ShardPlan

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}
INPUT_NAMES = ("tokens", "positions", "slots", "lengths", "targets")
"""The one signature of all graphs (design section 2); `targets` in score graphs only."""


def flat(name: str) -> str:
    """A tensor's name as a top-level buffer's name."""
    return name.replace(".", "__")


def weight_dtype(plan: ShardPlan, name: str, dtype: torch.dtype) -> torch.dtype:
    """A parameter's dtype in the graph: its own (derived tensors) or the port's."""
    fixed = plan.parameter(name).dtype
    return dtype if fixed is None else TORCH_DTYPES[fixed]


def example_inputs(unit: UnitSpec) -> tuple[Tensor, ...]:
    """Inputs of a unit's shape: what it is traced with. Rows name distinct slots."""
    shape = (unit.batch, unit.length)
    tokens = torch.zeros(shape, dtype=torch.int32)
    positions = torch.arange(unit.length, dtype=torch.int32).expand(shape).contiguous()
    slots = torch.arange(unit.batch, dtype=torch.int32)
    lengths = torch.full((unit.batch,), unit.length, dtype=torch.int32)
    inputs = (tokens, positions, slots, lengths)
    return (*inputs, tokens.clone()) if unit.phase == "score" else inputs
