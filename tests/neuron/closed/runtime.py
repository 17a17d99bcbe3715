"""The runtime as NxD calls it: SPMDModel, LayoutTransformation, `_parallel_load`.

Places: nxd_model.py (`add`, `set_weights`, `to_neuron`, `forward`), model_builder_utils.py
(`construct_layout_transformer_object`), base_nxd_model.py (states zeroed on device `privateuseone:<rank>`).
"""

from __future__ import annotations

import os

import torch

from tests.neuron.closed.neff import entry_of, execute, module_of
from tests.neuron.closed.program import Program
from tests.neuron.closed.protos import MetaNeff, MetaTensor
from tests.neuron.closed.tracing import get_torch_dtype

Tensors = dict[str, torch.Tensor]
TRANSFORMED = "_stand_in_layout"


def visible_cores() -> int:
    """Cores NEURON_RT_VISIBLE_CORES claims; the runtime seizes all of 12 when it is not set."""
    text = os.environ.get("NEURON_RT_VISIBLE_CORES", "0-11")
    first, _, last = text.partition("-")
    return int(last or first) - int(first) + 1


def parallel_load(checkpoint: list[Tensors]) -> list[Tensors]:
    if len(checkpoint) != visible_cores():
        raise RuntimeError(
            f"NeuronCore(s) not available - Requested:{len(checkpoint)} Available:{visible_cores()}"
        )
    return [{name: tensor.clone() for name, tensor in rank.items()} for rank in checkpoint]


def together(values: list[torch.Tensor]) -> torch.Tensor:
    """[ranks, …]: the ranks' tensors as one, each of them a part of it from now on. They are all of one shape."""
    first, size = values[0], values[0].numel()
    if all(
        v.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and (v.storage_offset(), v.is_contiguous()) == (i * size, True)
        for i, v in enumerate(values)
    ):
        return first.as_strided((len(values), *first.shape), (size, *first.stride()), 0)
    whole = torch.stack(values)
    for i, value in enumerate(values):
        value.set_(whole[i])  # type: ignore[call-overload]
    return whole


class LayoutTransformation:
    """Rewrites every rank's weights into the layout the priority graph was compiled for."""

    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int) -> None:
        self._module, self._metaneff = module_of(neff), MetaNeff()
        self._metaneff.ParseFromString(metaneff)
        self._ranks = local_ranks_size

    def forward(self, checkpoint: list[Tensors], to_host: bool) -> list[Tensors]:
        names = [t.checkpoint_key.decode() for t in self._metaneff.input_tensors]
        results = []
        for rank in parallel_load(checkpoint):
            made = execute(self._module, [rank[name] for name in names], 1)
            results.append(rank | dict(zip(names, made, strict=True)))
        return results


class SPMDModel:
    """One executable on all ranks. `initialize` binds the weights and states all models share."""

    def __init__(
        self, neff: bytes, metaneff: bytes, local_ranks_size: int, world_size: int
    ) -> None:
        self._module, self._metaneff = module_of(neff), MetaNeff()
        self._metaneff.ParseFromString(metaneff)
        self._neff, self._ranks = neff, local_ranks_size
        self._held: list[torch.Tensor] = []
        self._program: Program | None = None

    def initialize(self, states: list[Tensors], weights: list[Tensors], start_rank: int) -> None:
        if len(weights) != self._ranks or start_rank != 0:
            raise RuntimeError(f"NRT_INVALID: weights of {len(weights)} ranks for {self._ranks}")
        shapes = {
            i.parameter_number: list(i.shape.dimensions)
            for i in entry_of(self._module).instructions
            if i.opcode == "parameter"
        }
        self._held = []
        axes: list[int | None] = []
        kept = []
        for number, tensor in enumerate(self._metaneff.input_tensors):
            if tensor.type == MetaTensor.USER_INPUT:
                continue
            name = tensor.checkpoint_key.decode()
            source = states if tensor.type == MetaTensor.INPUT_STATE else weights
            values = [rank[name] for rank in source]
            wanted = (shapes[number], get_torch_dtype(tensor.data_type))
            for value in values:
                if (list(value.shape), value.dtype) != wanted:
                    raise RuntimeError(
                        f"NRT_INVALID: {name} is {value.shape} {value.dtype}, not {wanted}"
                    )
            weight = tensor.type == MetaTensor.INPUT_WEIGHT
            alike = weight and all(torch.equal(values[0], v) for v in values[1:])
            self._held.append(values[0] if alike else together(values))
            axes.append(None if alike else 0)
            kept.append(weight)
        self._program = Program(self._module, self._ranks, self._held, axes, kept)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's outputs, states written back."""
        if self._program is None:
            raise RuntimeError("NRT_UNINITIALIZED: this model is not initialized")
        expected = [t for t in self._metaneff.input_tensors if t.type == MetaTensor.USER_INPUT]
        for tensor, value in zip(expected, inputs, strict=True):
            if (list(value.shape), value.dtype) != (
                list(tensor.shape),
                get_torch_dtype(tensor.data_type),
            ):
                raise RuntimeError(f"NRT_EXEC_BAD_INPUT: {value.shape} {value.dtype}")
        aliases = self._metaneff.output_aliases_to
        outputs = []
        for i, result in enumerate(self._program.run(inputs)):
            if i in aliases:
                self._held[aliases[i] - len(inputs)].copy_(result)
            else:
                outputs.append(result[0].clone())
        return outputs

    def save_neff(self, path: str) -> bool:
        with open(path, "wb") as file:  # noqa: PTH123 - as the runtime does: a name it is given
            file.write(self._neff)
        return True
