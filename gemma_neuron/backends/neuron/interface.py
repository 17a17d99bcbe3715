"""What of a trace is needed to run its NEFF again: kept beside it, so that loading a port traces nothing.

The tracer's flattener and packer are objects of three Python literals; NxD's own save keeps them as text and
reads them back with `ast.literal_eval`, and so do we.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from gemma_neuron.backends.neuron.sdk import Sdk
from gemma_neuron.errors import IntegrityError

INTERFACE_NAME = "interface.json"
METANEFF_NAME = "metaneff.pb"


class GraphInput(BaseModel):
    """One input the graph was traced with; `required`: it has no default in `forward`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    required: bool
    shape: tuple[int, ...]


class Interface(BaseModel):
    """`interface.json` of a unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[GraphInput, ...]
    parameters: tuple[tuple[str, bool], ...]
    """`forward`'s own parameters: name, whether it has no default."""
    flattener: dict[str, str]
    packer: dict[str, str]
    weights: dict[str, int]
    """Weight name → its index among the graph's parameters."""


def interface_of(trace: Any) -> Interface:
    """Of NxD's TraceArtifacts, before `NxDModel.add` (which turns the flattener's tuple into a list)."""
    flattener, packer = trace.flattener, trace.packer
    return Interface(
        inputs=tuple(
            GraphInput(name=a.param_name, required=a.is_positional, shape=tuple(a.tensor.shape))
            for a in trace.provided_args
        ),
        parameters=tuple((p.param_name, p.is_positional) for p in trace.model_params),
        flattener={"layout": repr(flattener.layout), "exclude": repr(flattener.exclude)},
        packer={
            "layout": repr(packer.layout),
            "identifiers": repr(packer.identifiers),
            "constants": repr(packer.constants),
        },
        weights=dict(trace.weight_name_to_idx),
    )


def read_interface(folder: Path) -> Interface:
    """Raises IntegrityError for a file that is none."""
    path = folder / INTERFACE_NAME
    try:
        return Interface.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise IntegrityError(
            f"{path} is not a unit's interface: {str(error).splitlines()[0]}.",
            "Run `gemma-neuron compile` with the same arguments: it rebuilds it.",
        ) from error


def trace_artifacts(sdk: Sdk, folder: Path, interface: Interface) -> Any:
    """NxD's TraceArtifacts of a stored unit, without its HLO: what `NxDModel.add` reads.

    `add` may be called once with each: make them anew for another model.
    """
    metaneff = sdk.metaneff.MetaNeff()
    metaneff.ParseFromString((folder / METANEFF_NAME).read_bytes())
    flattener = {name: ast.literal_eval(text) for name, text in interface.flattener.items()}
    packer = {name: ast.literal_eval(text) for name, text in interface.packer.items()}
    info = sdk.artifacts
    return info.TraceArtifacts(
        hlo=None,
        metaneff=metaneff,
        flattener=sdk.structure.Flattener(flattener["layout"], flattener["exclude"]),
        packer=sdk.structure.Packer(packer["layout"], packer["identifiers"], packer["constants"]),
        weight_name_to_idx=dict(interface.weights),
        weight_names_to_skip=set(),
        provided_args=[
            info.ProvidedArgInfo(
                param_name=given.name,
                is_positional=given.required,
                tensor=torch.zeros(given.shape, dtype=torch.int32),
            )
            for given in interface.inputs
        ],
        model_params=[
            info.ModelParamInfo(param_name=name, is_positional=required)
            for name, required in interface.parameters
        ],
    )
