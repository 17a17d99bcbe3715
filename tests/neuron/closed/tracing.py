"""`torch_neuronx.xla_impl.trace` and `.structure` as NxD calls them.

Places: trace/functions.py `trace` (generate_hlo and what it reads of the result), hlo_utils.py (HloArtifacts, entry
computation, computation by id, root), nxd_model.py (get_torch_dtype, Flattener, Packer).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.neuron.closed import graph as graphs
from tests.neuron.closed.protos import (
    META_OF_ELEMENT,
    META_TYPES,
    MUST_ALIAS,
    MetaNeff,
    MetaTensor,
)
from tests.neuron.closed.recorder import Node

XLA_DTYPE_TO_METANEFF_DTYPE = META_OF_ELEMENT


class Flattener:
    """Picks the graph's inputs out of the caller's. `layout`: a tuple of positions; `exclude`: those unused."""

    def __init__(self, layout: Any, exclude: Any) -> None:
        self.layout, self.exclude = layout, exclude

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        left_out = set(self.exclude or ())
        return [inputs[i] for i in self.layout if i not in left_out]


class Packer:
    """Gives outputs the structure the traced model returned."""

    def __init__(self, layout: Any, identifiers: Any, constants: Any) -> None:
        self.layout, self.identifiers, self.constants = layout, identifiers, constants

    def __call__(self, outputs: list[torch.Tensor]) -> Any:
        assert len(outputs) == len(self.identifiers), "another graph's packer"
        return tuple(outputs) if self.layout == "tuple" else outputs[0]


@dataclass
class HloArtifacts:
    hlo_module: Any
    flattener: Any
    packer: Any
    metaneff: Any
    weights: Any
    constant_parameter_tensors: Any
    weight_name_to_idx: Any


def generate_hlo(
    model: nn.Module,
    example_inputs: OrderedDict[str, torch.Tensor],
    *,
    inline_weights_to_neff: bool,
    return_weights: bool,
    output_aliased_tensor: bool,
    cpu_backend: bool,
    preserve_parameters: bool,
    enable_aliasing: bool,
    treat_inputs_as_kwargs: bool,
) -> HloArtifacts:
    """Trace without computing. A buffer that `forward` re-assigns is state; what the graph does not read is no
    parameter of it; a tensor that is neither parameter, buffer nor input cannot be traced. Meanwhile a second copy of
    the module's tensors is held, as by torch_xla, whose device of the CPU the module is moved to."""
    assert cpu_backend and treat_inputs_as_kwargs and enable_aliasing and preserve_parameters
    assert not (inline_weights_to_neff or return_weights or output_aliased_tensor)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    moved = [tensor.detach().clone() for tensor in held.values()]
    blank = {n: _blank(t) for n, t in (example_inputs | held).items()}
    own = {name: blank[name] for name in held}
    tracer = graphs.Tracer(list(blank.values()))
    with _without_compiler(), torch.no_grad(), _holding(model, own), torch.device("meta"), tracer:
        result = model(**{name: blank[name] for name in example_inputs})
        now = dict(model.named_buffers())
    outputs = list(result) if isinstance(result, tuple) else [result]
    changed = [name for name in now if now[name] is not own[name]]
    results = [tracer.node(tensor) for tensor in (*outputs, *(now[name] for name in changed))]
    assert all(isinstance(node, Node) for node in results), "an output from outside the graph"
    structure = "tuple" if isinstance(result, tuple) else "tensor"
    del moved
    return _artifacts(tracer, list(example_inputs), list(held), changed, results, structure)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """torch's kernels without data import its compiler only to say that it shall leave them alone: a second's work."""
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    placeholder: Any = ModuleType(name)
    placeholder.disable = lambda function, *args, **kwargs: function
    sys.modules[name] = placeholder
    setattr(torch, "_dynamo", placeholder)  # noqa: B010 - mypy knows the real one
    try:
        yield
    finally:
        del sys.modules[name]
        delattr(torch, "_dynamo")


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _artifacts(
    tracer: graphs.Tracer,
    inputs: list[str],
    names: list[str],
    changed: list[str],
    results: list[Any],
    structure: str,
) -> HloArtifacts:
    nodes = graphs.live(results, tracer.nodes)
    used = {operand for node in nodes for operand in node.operands()} | set(results)
    given, held = tracer.inputs[: len(inputs)], tracer.inputs[len(inputs) :]
    unused = [i for i, node in enumerate(given) if node not in used]
    kept = [node for node in given if node in used]
    read = {name: node for name, node in zip(names, held, strict=True) if node in used}
    hlo = graphs.module_of("traced", [*kept, *read.values()], nodes, results)
    metaneff = MetaNeff()
    for node in kept:
        _describe(metaneff.input_tensors.add(), node, "USER_INPUT", "")
    for name, node in read.items():
        kind = "INPUT_STATE" if name in changed else "INPUT_WEIGHT"
        _describe(metaneff.input_tensors.add(), node, kind, name)
    numbers = {name: len(kept) + i for i, name in enumerate(read)}
    own = len(results) - len(changed)
    for i, node in enumerate(results):
        _describe(metaneff.output_tensors.add(), node, "USER_INPUT", "")
        if i >= own and changed[i - own] in numbers:
            number = numbers[changed[i - own]]
            metaneff.output_aliases_to[i] = number
            alias = hlo.input_output_alias.entries.add(parameter_number=number, kind=MUST_ALIAS)
            alias.output_shape_index.append(i)
    metaneff.serialized_graph_def = hlo.SerializeToString()
    return HloArtifacts(
        hlo_module=hlo,
        flattener=Flattener(tuple(range(len(inputs))), unused or None),
        packer=Packer(structure, list(range(own)), []),
        metaneff=metaneff,
        weights=None,
        constant_parameter_tensors=None,
        weight_name_to_idx={n: i for n, i in numbers.items() if n not in changed},
    )


def _describe(tensor: Any, node: Node, kind: str, name: str) -> None:
    value = node.value
    tensor.shape.extend(value.shape)
    tensor.data_type = META_TYPES[str(value.dtype).removeprefix("torch.")]
    tensor.type = getattr(MetaTensor, kind)
    tensor.checkpoint_key = name.encode()


@contextmanager
def _holding(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """The model with these tensors in place of its own, put back afterwards."""
    saved = []
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        table = owner._parameters if last in owner._parameters else owner._buffers
        saved.append((table, last, table[last]))
        table[last] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, last, value in saved:
            table[last] = value  # type: ignore[assignment]


def get_torch_dtype(data_type: int) -> torch.dtype:
    name = next(name for name, number in META_TYPES.items() if number == data_type)
    found: torch.dtype = getattr(torch, name)
    return found


def hlo_entry_computation(module: Any) -> Any:
    return get_hlo_computation_by_id(module, module.entry_computation_id)


def get_hlo_computation_by_id(module: Any, number: int) -> Any:
    return next(c for c in module.computations if c.id == number)


def get_hlo_root_instruction(computation: Any) -> Any:
    return next(i for i in computation.instructions if i.id == computation.root_id)
