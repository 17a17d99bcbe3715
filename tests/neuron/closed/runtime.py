"""The runtime as NxD calls it: SPMDModel, LayoutTransformation, `_parallel_load`.

Places: nxd_model.py (`add`, `set_weights`, `to_neuron`, `forward`), model_builder_utils.py
(`construct_layout_transformer_object`), base_nxd_model.py (states zeroed on device `privateuseone:<rank>`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.neuron.closed.neff import Ranks, entry_of, execute, module_of
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
        self._held: list[Any] = []
        self._states: list[Tensors] | None = None

    def initialize(self, states: list[Tensors], weights: list[Tensors], start_rank: int) -> None:
        if len(weights) != self._ranks or start_rank != 0:
            raise RuntimeError(f"NRT_INVALID: weights of {len(weights)} ranks for {self._ranks}")
        shapes = {
            i.parameter_number: list(i.shape.dimensions)
            for i in entry_of(self._module).instructions
            if i.opcode == "parameter"
        }
        self._held, self._states = [], states
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
            alike = tensor.type == MetaTensor.INPUT_WEIGHT and all(
                torch.equal(values[0], v) for v in values[1:]
            )
            self._held.append(values[0] if alike else Ranks(values))

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's outputs, states written back."""
        if self._states is None:
            raise RuntimeError("NRT_UNINITIALIZED: this model is not initialized")
        expected = [t for t in self._metaneff.input_tensors if t.type == MetaTensor.USER_INPUT]
        for tensor, value in zip(expected, inputs, strict=True):
            if (list(value.shape), value.dtype) != (
                list(tensor.shape),
                get_torch_dtype(tensor.data_type),
            ):
                raise RuntimeError(f"NRT_EXEC_BAD_INPUT: {value.shape} {value.dtype}")
        results = execute(self._module, [*inputs, *self._held], self._ranks)
        aliases = self._metaneff.output_aliases_to
        outputs = []
        for i, result in enumerate(results):
            if i in aliases:
                held = self._held[aliases[i] - len(inputs)]
                for rank in range(self._ranks):
                    held[rank].copy_(result[rank] if isinstance(result, Ranks) else result)
            else:
                outputs.append(result[0] if isinstance(result, Ranks) else result)
        return outputs

    def save_neff(self, path: str) -> bool:
        with open(path, "wb") as file:  # noqa: PTH123 - as the runtime does: a name it is given
            file.write(self._neff)
        return True
