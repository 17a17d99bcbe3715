"""The real lowering in the place of torch_neuronx's closed `generate_hlo`: the product's tracing runs on NxD's own
source and nothing is imitated but what is closed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_xla

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Lowered:
    """One graph. `numbers`: parameter or buffer → its number among the graph's parameters, -1 for none."""

    proto: bytes
    text: str
    numbers: dict[str, int]
    inputs: dict[str, int]
    """As `numbers`, of the call's own tensors."""
    shapes: dict[str, list[Any]]
    states: list[str]
    """Buffers that the call re-assigned, in the order in which they follow the outputs."""
    outputs: list[list[Any]]

    def facts(self) -> dict[str, Any]:
        kept = ("numbers", "inputs", "shapes", "states", "outputs")
        return {"bytes": len(self.proto)} | {name: getattr(self, name) for name in kept}


MADE: list[Lowered] = []
"""What `generate_hlo` lowered in this process."""


def lower(model: Any, example: dict[str, Any]) -> Lowered:
    """Move the model to torch_xla's device of the CPU, call it without computing, and lower what it returns."""
    device = torch_xla.device()
    model.to(device)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    given = {name: value.to(device) for name, value in example.items()}
    with torch.no_grad():
        result = model(**given)
    outputs = list(result) if isinstance(result, tuple) else [result]
    states = {n: b for n, b in model.named_buffers() if b is not held[n]}
    results = [*outputs, *states.values()]
    context = torch_xla._XLAC.lowering.LoweringContext("graph")
    context.build(results)

    def number(value: Any) -> int:
        found = context.tensor_parameter_id(value)
        return -1 if found is None else int(found)

    return Lowered(
        proto=bytes(context.hlo()),
        text=str(torch_xla._XLAC._get_xla_tensors_hlo(results)),
        numbers={name: number(value) for name, value in held.items()},
        inputs={name: number(value) for name, value in given.items()},
        shapes={name: _slot(value) for name, value in held.items()},
        states=list(states),
        outputs=[_slot(value) for value in results],
    )


def _slot(value: Any) -> list[Any]:
    return [list(value.shape), str(value.dtype)]


def provide(source: Path) -> None:
    """Make NxD importable from its source, on the tests' stand-ins for what is closed and the real torch_xla."""
    # Behind the environment's own packages: torch_xla is real here.
    sys.path.insert(0, str(source))
    sys.path.append(str(ROOT / "tests" / "neuron" / "packages" / "closed"))
    import torch_neuronx.xla_impl.trace as closed

    closed.generate_hlo = generate_hlo


def generate_hlo(model: Any, example_inputs: dict[str, Any], **flags: Any) -> Any:
    """As the stand-in of that name describes a graph, but lowered by torch_xla."""
    from tests.neuron.closed import tracing as stand_in
    from tests.neuron.closed.protos import META_TYPES, HloModuleProto, MetaNeff, MetaTensor

    assert flags["cpu_backend"] and flags["enable_aliasing"] and flags["preserve_parameters"]
    made = lower(model, dict(example_inputs))
    MADE.append(made)
    module, metaneff = HloModuleProto(), MetaNeff()
    module.ParseFromString(made.proto)

    def describe(shape: list[int], dtype: str, kind: str, name: str) -> None:
        added = metaneff.input_tensors.add(shape=shape, checkpoint_key=name.encode())
        added.data_type = META_TYPES[dtype.removeprefix("torch.")]
        added.type = getattr(MetaTensor, kind)

    for name, value in example_inputs.items():
        if made.inputs[name] >= 0:
            describe(*_slot(value), "USER_INPUT", "")
    for name in sorted(
        (n for n, i in made.numbers.items() if i >= 0), key=made.numbers.__getitem__
    ):
        describe(*made.shapes[name], "INPUT_STATE" if name in made.states else "INPUT_WEIGHT", name)
    unused = [i for i, name in enumerate(example_inputs) if made.inputs[name] < 0]
    own = len(made.outputs) - len(made.states)
    weights = {n: i for n, i in made.numbers.items() if i >= 0 and n not in made.states}
    return stand_in.HloArtifacts(
        hlo_module=module,
        flattener=stand_in.Flattener(tuple(range(len(example_inputs))), unused or None),
        packer=stand_in.Packer("tuple", list(range(own)), []),
        metaneff=metaneff,
        weights=None,
        constant_parameter_tensors=None,
        weight_name_to_idx=weights,
    )
