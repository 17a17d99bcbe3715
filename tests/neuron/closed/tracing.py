"""`torch_neuronx.xla_impl.trace` and `.structure` as NxD calls them.

Places: trace/functions.py `trace` (generate_hlo and what it reads of the result), hlo_utils.py (HloArtifacts, entry
computation, computation by id, root), nxd_model.py (get_torch_dtype, Flattener, Packer).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.neuron.closed import graph as graphs
from tests.neuron.closed.protos import (
    META_OF_ELEMENT,
    META_TYPES,
    MUST_ALIAS,
    MetaNeff,
    MetaTensor,
)

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
    parameter of it; a tensor that is neither parameter, buffer nor input cannot be traced."""
    assert cpu_backend and treat_inputs_as_kwargs and enable_aliasing and preserve_parameters
    assert not (inline_weights_to_neff or return_weights or output_aliased_tensor)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    names, inputs = list(held), list(example_inputs)
    changed: list[str] = []
    structure: list[str] = []

    def traced(*tensors: torch.Tensor) -> list[torch.Tensor]:
        own = dict(zip(names, tensors[len(inputs) :], strict=True))
        with _holding(model, own):
            result = model(**dict(zip(inputs, tensors[: len(inputs)], strict=True)))
            now = dict(model.named_buffers())
        structure.append("tuple" if isinstance(result, tuple) else "tensor")
        changed.extend(n for n in names if n in now and now[n] is not own[n])
        outputs = list(result) if isinstance(result, tuple) else [result]
        return outputs + [now[n] for n in changed]

    with torch.no_grad():
        module = make_fx(traced, tracing_mode="fake")(
            *example_inputs.values(), *(t.detach() for t in held.values())
        )
    graphs.rebound(module.graph)
    module.graph.eliminate_dead_code()
    return _artifacts(module.graph, inputs, names, changed, structure[0])


def _artifacts(
    graph: fx.Graph, inputs: list[str], names: list[str], changed: list[str], structure: str
) -> HloArtifacts:
    places = [node for node in graph.nodes if node.op == "placeholder"]
    given, held = places[: len(inputs)], dict(zip(names, places[len(inputs) :], strict=True))
    unused = [i for i, node in enumerate(given) if not node.users]
    kept = [node for node in given if node.users]
    read = {name: node for name, node in held.items() if node.users}
    hlo = graphs.module_of(graph, "traced", [*kept, *read.values()])
    metaneff = MetaNeff()
    for node in kept:
        _describe(metaneff.input_tensors.add(), node, "USER_INPUT", "")
    for name, node in read.items():
        kind = "INPUT_STATE" if name in changed else "INPUT_WEIGHT"
        _describe(metaneff.input_tensors.add(), node, kind, name)
    numbers = {name: len(kept) + i for i, name in enumerate(read)}
    (output,) = [node for node in graph.nodes if node.op == "output"]
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    own = len(results) - len(changed)
    for i, node in enumerate(results):
        assert isinstance(node, fx.Node)
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


def _describe(tensor: Any, node: fx.Node, kind: str, name: str) -> None:
    value = node.meta["val"]
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
