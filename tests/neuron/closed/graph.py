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
from torch import fx

from tests.neuron.closed.protos import ELEMENT_TYPES, HloModuleProto

GETITEM = "getitem"
VIEWS = ("aten.view.default", "aten._unsafe_view.default")
COLLECTIVES = {"standin.all_reduce": "all-reduce", "standin.all_gather": "all-gather"}
torch.library.define("standin::all_reduce", "(Tensor x, str groups) -> Tensor")
torch.library.define("standin::all_gather", "(Tensor x, int dim, str groups) -> Tensor")


def _gathered(x: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= len(json.loads(groups)[0])
    return x.new_empty(shape)


torch.library.register_fake("standin::all_reduce", lambda x, groups: torch.empty_like(x))
torch.library.register_fake("standin::all_gather", _gathered)


def rebound(graph: fx.Graph) -> None:
    """Resolve NxD's in-place collectives as lazy tracing does: from there on the tensor *is* the sum.

    A tensor that was not copied first (a residual, a parameter) is thereby changed for all that follows.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            target, value = node.args[:2]
            node.replace_all_uses_with(value)
            order = {n: i for i, n in enumerate(graph.nodes)}
            target.replace_all_uses_with(
                value, delete_user_cb=lambda user, here=order[node], o=order: o[user] > here
            )
            graph.erase_node(node)


def module_of(graph: fx.Graph, name: str, inputs: list[fx.Node]) -> Any:
    """`inputs`: the placeholders that become parameters, in order; others must be unused."""
    module = HloModuleProto(name=name, id=1, entry_computation_id=1, entry_computation_name=name)
    entry = module.computations.add(name=name, id=1)
    ids: dict[fx.Node, int] = {}
    for number, node in enumerate(inputs):
        instruction = entry.instructions.add(
            name=f"p{number}", opcode="parameter", id=number + 1, parameter_number=number
        )
        ids[node] = number + 1
        set_shape(instruction.shape, node.meta["val"])
        set_shape(entry.program_shape.parameters.add(), node.meta["val"])
        entry.program_shape.parameter_names.append(f"p{number}")
    for node in graph.nodes:
        if node.op == "call_function":
            ids[node] = len(ids) + 1
            _add_operation(entry.instructions.add(id=ids[node], name=node.name), node, ids)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    results = list(output.args[0])
    root = entry.instructions.add(name="root", opcode="tuple", id=len(ids) + 1)
    root.operand_ids.extend(ids[node] for node in results)
    entry.root_id = root.id
    root.shape.element_type = 13
    for node in results:
        set_shape(root.shape.tuple_shapes.add(), node.meta["val"])
    entry.program_shape.result.CopyFrom(root.shape)
    module.host_program_shape.CopyFrom(entry.program_shape)
    return module


def set_shape(shape: Any, value: torch.Tensor) -> None:
    name = str(value.dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES:
        raise TypeError(f"{name} has no place in a graph for this hardware")
    shape.element_type = ELEMENT_TYPES[name]
    shape.dimensions.extend(value.shape)


def _add_operation(instruction: Any, node: fx.Node, ids: dict[fx.Node, int]) -> None:
    name = GETITEM if node.target is operator.getitem else str(node.target)
    collective = COLLECTIVES.get(name.removesuffix(".default"))
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        set_shape(instruction.shape, value)
    instruction.operand_ids.extend(ids[n] for n in node.all_input_nodes)
    if collective is not None:
        config = {"groups": json.loads(str(node.args[-1]))}
        if collective == "all-gather":
            config["dim"] = node.args[1]
        instruction.opcode, instruction.backend_config = collective, json.dumps(config).encode()
        return
    order = {n: i for i, n in enumerate(node.all_input_nodes)}
    config = {
        "args": [_encoded(a, order) for a in node.args],
        "kwargs": {k: _encoded(v, order) for k, v in node.kwargs.items()},
    }
    instruction.opcode = name
    instruction.backend_config = json.dumps(config).encode()


def _encoded(value: Any, order: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"operand": order[value]}
    if isinstance(value, (list, tuple)):
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
