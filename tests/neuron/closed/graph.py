"""A traced module as an HLO module whose instructions are torch's own operators, and back to callables.

Arguments that are tensors become operands in order; the rest stands as JSON in `backend_config`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tests.neuron.closed.protos import ELEMENT_TYPES, HloModuleProto
from tests.neuron.closed.recorder import Node, Recorder

GETITEM = "getitem"
VIEWS = ("aten.view.default", "aten._unsafe_view.default")
COLLECTIVES = {"standin.all_reduce": "all-reduce", "standin.all_gather": "all-gather"}
torch.library.define("standin::all_reduce", "(Tensor x, str groups) -> Tensor")
torch.library.define("standin::all_gather", "(Tensor x, int dim, str groups) -> Tensor")


def _gathered(x: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= _size(groups)
    return x.new_empty(shape)


def _size(groups: str) -> int:
    return len(json.loads(groups)[0])


def _sum_of_ranks(info: Any, axes: Any, x: torch.Tensor, groups: str) -> tuple[torch.Tensor, None]:
    return x.sum(axes[0]), None


def _ranks_joined(
    info: Any, axes: Any, x: torch.Tensor, dim: int, groups: str
) -> tuple[torch.Tensor, None]:
    return torch.cat(x.unbind(axes[0]), dim), None


torch.library.register_vmap("standin::all_reduce", _sum_of_ranks)
torch.library.register_vmap("standin::all_gather", _ranks_joined)
torch.library.register_fake("standin::all_reduce", lambda x, groups: torch.empty_like(x))
torch.library.register_fake("standin::all_gather", _gathered)
# Of a value that all ranks share, outside `vmap`.
torch.library.impl("standin::all_reduce", "CPU", lambda x, groups: x * _size(groups))
torch.library.impl(
    "standin::all_gather", "CPU", lambda x, dim, groups: torch.cat([x] * _size(groups), dim)
)


class Tracer(Recorder):
    """Records a module's calls on tensors without data. What is no input of it has no place in a graph."""

    def wanted(self, call: Node, result: Any) -> bool:
        function: Any = call.function
        if any(isinstance(a, torch.Tensor) for a in call.args):
            raise TypeError(f"{function} takes a tensor that is no parameter, buffer or input")
        if function is torch.ops.aten.copy_.default:
            # As lazy tracing resolves NxD's in-place collectives: the tensor *is* the sum from here on, and one that
            # was not copied first (a residual, a parameter) is changed for all that follows.
            self.rebind(result, call.args[1])
            return False
        if function._schema.is_mutable:
            raise TypeError(f"{function} changes a tensor in place")
        return True


def live(results: list[Node], nodes: list[Node]) -> list[Node]:
    """The nodes that results follow from, in order."""
    wanted = set(results)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(node.operands())
    return [node for node in nodes if node in wanted]


def module_of(name: str, inputs: list[Node], nodes: list[Node], results: list[Node]) -> Any:
    """`inputs` become parameters, in order; `nodes` follow from nothing else."""
    module = HloModuleProto(name=name, id=1, entry_computation_id=1, entry_computation_name=name)
    entry = module.computations.add(name=name, id=1)
    ids = {node: i + 1 for i, node in enumerate([*inputs, *nodes])}
    for number, node in enumerate(inputs):
        instruction = entry.instructions.add(
            name=f"p{number}", opcode="parameter", id=ids[node], parameter_number=number
        )
        set_shape(instruction.shape, node.value)
        set_shape(entry.program_shape.parameters.add(), node.value)
        entry.program_shape.parameter_names.append(f"p{number}")
    for node in nodes:
        _add_operation(entry.instructions.add(id=ids[node], name=f"op.{ids[node]}"), node, ids)
    root = entry.instructions.add(name="root", opcode="tuple", id=len(ids) + 1)
    root.operand_ids.extend(ids[node] for node in results)
    entry.root_id = root.id
    root.shape.element_type = 13
    for node in results:
        set_shape(root.shape.tuple_shapes.add(), node.value)
    entry.program_shape.result.CopyFrom(root.shape)
    module.host_program_shape.CopyFrom(entry.program_shape)
    return module


def set_shape(shape: Any, value: torch.Tensor) -> None:
    name = str(value.dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES:
        raise TypeError(f"{name} has no place in a graph for this hardware")
    shape.element_type = ELEMENT_TYPES[name]
    shape.dimensions.extend(value.shape)


def _add_operation(instruction: Any, node: Node, ids: dict[Node, int]) -> None:
    name = GETITEM if node.function is operator.getitem else str(node.function)
    collective = COLLECTIVES.get(name.removesuffix(".default"))
    if isinstance(node.value, torch.Tensor):
        set_shape(instruction.shape, node.value)
    operands = node.operands()
    instruction.operand_ids.extend(ids[n] for n in operands)
    config: dict[str, Any]
    if collective is not None:
        config = {"groups": json.loads(node.args[-1])}
        if collective == "all-gather":
            config["dim"] = node.args[1]
        instruction.opcode, instruction.backend_config = collective, json.dumps(config).encode()
        return
    order = {n: i for i, n in enumerate(operands)}
    config = {
        "args": [_encoded(a, order) for a in node.args],
        "kwargs": {k: _encoded(v, order) for k, v in node.kwargs.items()},
    }
    instruction.opcode = name
    instruction.backend_config = json.dumps(config).encode()


def _encoded(value: Any, order: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"operand": order[value]}
    if isinstance(value, list):
        return [_encoded(v, order) for v in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument of type {type(value).__name__} in the graph: {value}")


@cache
def operation(opcode: str, config: bytes) -> Callable[[list[Any]], Any]:
    """The callable of an instruction: tensors in, tensor (or tuple) out."""
    decoded = json.loads(config)
    args, kwargs = decoded["args"], decoded["kwargs"]
    if opcode == GETITEM:
        return lambda xs: xs[0][args[1]]
    if opcode in VIEWS:  # a graph has no strides
        return lambda xs: xs[0].reshape(_decoded(args[1], xs))
    library, name, overload = opcode.split(".")
    function = getattr(getattr(getattr(torch.ops, library), name), overload)

    def call(xs: list[Any]) -> Any:
        return function(
            *(_decoded(a, xs) for a in args), **{k: _decoded(v, xs) for k, v in kwargs.items()}
        )

    return call


def _decoded(value: Any, xs: list[Any]) -> Any:
    if isinstance(value, dict):
        return xs[value["operand"]] if "operand" in value else getattr(torch, value["dtype"])
    return [_decoded(v, xs) for v in value] if isinstance(value, list) else value
