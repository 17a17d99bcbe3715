"""Plain values that NxD's units hand on (trace/model_builder_utils.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.neuron.nxd.recorded import recorded


@recorded("trace.model_builder_utils:ModelParamInfo")
@dataclass
class ModelParamInfo:
    param_name: str
    is_positional: bool


@recorded("trace.model_builder_utils:ProvidedArgInfo")
@dataclass
class ProvidedArgInfo:
    param_name: str
    is_positional: bool
    tensor: torch.Tensor


@recorded("trace.model_builder_utils:TraceArtifacts")
@dataclass
class TraceArtifacts:
    hlo: Any
    metaneff: Any
    flattener: Any
    packer: Any
    weight_name_to_idx: dict[str, int]
    weight_names_to_skip: set[str]
    provided_args: list[Any]
    model_params: list[Any]


@recorded("trace.model_builder_utils:CompilationArtifacts")
@dataclass
class CompilationArtifacts:
    neff_filepath: str


@recorded("trace.model_builder_utils:WLOArtifacts")
@dataclass
class WLOArtifacts:
    neff_filepath: str
    wrapped_neff_hlo_filepath: str | None = None


@recorded("trace.model_builder_utils:LayoutTransformerArtifacts")
@dataclass
class LayoutTransformerArtifacts:
    hlo_filepath: str
    neff_filepath: str
    metaneff_filepath: str
