"""Compare a traced graph's weights and states with the plan and the rank files. Nothing below us does.

Until the device is reached, NxD passes on missing, surplus, misshapen and wrongly typed weights without a word;
what the runtime then does is not documented. A difference stops the port.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemma_neuron.backends.neuron.shell import CORE, ROWS
from gemma_neuron.backends.tensors import TORCH_DTYPES, flat, weight_dtype
from gemma_neuron.errors import CompileError, IntegrityError
from gemma_neuron.models.view import RankView
from gemma_neuron.plan import ShardPlan

STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}
"""What rank files hold: the checkpoint's own dtypes, cast when a port is loaded."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of a graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Table = dict[str, Slot]


def expected_weights(plan: ShardPlan, dtype: str, max_context: int) -> Table:
    """Every weight a graph must ask for, under the graph's names."""
    port_dtype = TORCH_DTYPES[dtype]
    table = {
        CORE + p.name: Slot(p.local_shape, weight_dtype(plan, p.name, port_dtype))
        for p in plan.parameters
    }
    return table | {ROWS: Slot((max_context,), torch.int32)}


def expected_states(view: RankView, dtype: str) -> Table:
    return {
        flat(name): Slot(tuple(shape), TORCH_DTYPES[dtype])
        for name, shape in view.state_shapes().items()
    }


def traced_tables(metaneff: Any, kinds: Any, to_torch: Any) -> tuple[Table, Table]:
    """(weights, states) the traced graph asks for by name.

    `kinds`: the metaneff's enum of input types; `to_torch`: its data type → torch dtype.
    """
    weights: Table = {}
    states: Table = {}
    for tensor in metaneff.input_tensors:
        slot = Slot(tuple(tensor.shape), to_torch(tensor.data_type))
        name = _text(tensor.checkpoint_key)
        if tensor.type == kinds.INPUT_WEIGHT:
            weights[name] = slot
        elif tensor.type == kinds.INPUT_STATE:
            states[name] = slot
    return weights, states


def require_same(what: str, unit: str, expected: Table, found: Table) -> None:
    """Raises CompileError with the first differing names, shapes and dtypes."""
    if wrong := differences(expected, found):
        raise CompileError(
            f"{unit}: the traced graph's {what} are not the plan's ({len(wrong)} differ): "
            f"{'; '.join(wrong[:4])}.",
            "Nothing was compiled. A weight that is missing here was baked into the graph or lost by the tracer.",
        )


def differences(expected: Table, found: Table) -> list[str]:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} was not expected" for name in found if name not in expected]
    wrong += [
        f"{name} is {found[name]}, expected {slot}"
        for name, slot in expected.items()
        if name in found and found[name] != slot
    ]
    return wrong


def check_rank_files(files: Iterable[Path], plan: ShardPlan) -> None:
    """Each rank file holds each planned parameter in its local shape; dtypes may still be the checkpoint's.

    Raises IntegrityError naming file and tensors.
    """
    wanted = {p.name: p for p in plan.parameters}
    for path in files:
        held = _header(path)
        wrong = [f"{name} is missing" for name in wanted if name not in held]
        wrong += [f"{name} was not expected" for name in held if name not in wanted]
        for name, parameter in wanted.items():
            if name in held:
                shape, dtype = held[name]
                fixed = parameter.dtype
                if shape != parameter.local_shape or dtype not in STORED_DTYPES:
                    wrong.append(f"{name} is {list(shape)} {dtype}")
                elif fixed is not None and STORED_DTYPES[dtype] != TORCH_DTYPES[fixed]:
                    wrong.append(f"{name} is {dtype}, expected {fixed}")
        if wrong:
            raise IntegrityError(
                f"{path} is not what the graphs ask for ({len(wrong)} differ): {'; '.join(wrong[:4])}.",
                f"Remove {path.with_suffix('')}.committed, then run `compile` again: it is written anew.",
            )


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    return {
        name: (tuple(entry["shape"]), entry["dtype"])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _text(key: bytes | str) -> str:
    """XLA writes `->` for the dots of a module path."""
    text = key.decode() if isinstance(key, bytes) else key
    return text.replace("->", ".")
