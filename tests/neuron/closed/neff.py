"""What the stand-in compiler makes of a graph, and an interpreter of it.

An executable is the HLO module behind a mark, its parameters in the layouts it was compiled for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.neuron.closed.protos import HloModuleProto

MARK = b"STAND-IN-NEFF\n"
UNDO = "undo-layout"


def executable(hlo: bytes) -> bytes:
    return MARK + hlo


def module_of(neff: bytes) -> Any:
    """Raises RuntimeError for what is no executable of the stand-in compiler."""
    if not neff.startswith(MARK):
        raise RuntimeError("NRT_UNSUPPORTED_NEFF_VERSION: NEFF version mismatch")
    module = HloModuleProto()
    module.ParseFromString(neff[len(MARK) :])
    return module


def entry_of(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def undo_layout(module: Any, computations: dict[int, Any]) -> None:
    """Let the graph expect parameters (number → transforming computation) in their new layout.

    The transformation is a reshape, a transpose and a reshape back, so its inverse is another such.
    """
    entry = entry_of(module)
    following = max(i.id for i in entry.instructions) + 1
    changed = []
    for instruction in entry.instructions:
        changed.append(instruction)
        if instruction.opcode != "parameter" or instruction.parameter_number not in computations:
            continue
        reshape, transpose = computations[instruction.parameter_number].instructions[1:3]
        undo = type(instruction)()
        undo.CopyFrom(instruction)
        undo.opcode, undo.id, undo.name = UNDO, following, f"undo.{following}"
        config = {"shape": list(reshape.shape.dimensions), "order": list(transpose.dimensions)}
        undo.backend_config = json.dumps(config).encode()
        del undo.operand_ids[:]
        undo.operand_ids.append(instruction.id)
        for user in entry.instructions:
            for i, operand in enumerate(user.operand_ids):
                if operand == instruction.id:
                    user.operand_ids[i] = following
        changed.append(undo)
        following += 1
    del entry.instructions[:]
    entry.instructions.extend(changed)


def execute(module: Any, inputs: Sequence[Any], ranks: int) -> list[Any]:
    """One rank's root tuple for its inputs by parameter number. Under `vmap` over the ranks, all ranks'."""
    entry = entry_of(module)
    called = {c.id: c for c in module.computations}
    values: dict[int, Any] = {}
    for instruction in entry.instructions:
        operands = [values[i] for i in instruction.operand_ids]
        if instruction.opcode == "parameter":
            values[instruction.id] = inputs[instruction.parameter_number]
        elif instruction.opcode == "tuple":
            values[instruction.id] = operands
        elif instruction.opcode in ("all-reduce", "all-gather"):
            values[instruction.id] = _joined(instruction, operands[0], ranks)
        else:
            values[instruction.id] = _operator(instruction, called)(operands)
    found: list[Any] = values[entry.root_id]
    return found


def _joined(instruction: Any, operand: Any, ranks: int) -> Any:
    import torch

    config = json.loads(instruction.backend_config)
    if config["groups"] != [list(range(ranks))]:
        raise RuntimeError(f"collective over {config['groups']}, loaded on ranks 0 to {ranks - 1}")
    groups = json.dumps(config["groups"])
    if instruction.opcode == "all-gather":
        return torch.ops.standin.all_gather(operand, config["dim"], groups)
    return torch.ops.standin.all_reduce(operand, groups)


def _operator(instruction: Any, called: dict[int, Any]) -> Callable[[list[Any]], Any]:
    from tests.neuron.closed.graph import operation

    if instruction.opcode == UNDO:
        config = json.loads(instruction.backend_config)
        shape, order = config["shape"], config["order"]
        moved = [shape[i] for i in order]
        back = [order.index(i) for i in range(len(order))]
        return lambda xs: xs[0].reshape(moved).permute(back).reshape(xs[0].shape)
    if instruction.opcode == "call":
        reshape, transpose, last = called[instruction.called_computation_ids[0]].instructions[1:4]
        return lambda xs: (
            xs[0]
            .reshape(list(reshape.shape.dimensions))
            .permute(list(transpose.dimensions))
            .reshape(list(last.shape.dimensions))
            .contiguous()
        )
    return operation(instruction.opcode, instruction.backend_config)
