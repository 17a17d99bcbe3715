"""The Neuron SDK, imported late and by full module paths, its calls compared with the recorded ones.

`neuronx_distributed.ModelBuilder` names different classes in different releases, so nothing is taken from the
package itself. The SDK is closed in parts and frozen; what we call of NxD is listed in `data/neuron/calls.json`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

from gemma_neuron.errors import BackendUnavailableError

INSTALL = (
    "Run scripts/bootstrap-inf2, or install the extra `neuron` from AWS's package repository "
    "(README, Inferentia2)."
)


@dataclass(frozen=True, slots=True)
class Sdk:
    """NxD's modules and the closed ones it stands on. Fields are modules: their members are untyped."""

    functions: Any
    hlo_utils: Any
    mappings: Any
    artifacts: Any
    nxd_model: Any
    parallel: Any
    metaneff: Any
    structure: Any
    tracing: Any


@cache
def load() -> Sdk:
    """Import NxD. Raises BackendUnavailableError naming what is missing or called differently."""
    _without_hf_tracer()
    try:
        # NxD's logger takes the stdout it finds at import; ours carries results only.
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            sdk = Sdk(
                functions=importlib.import_module("neuronx_distributed.trace.functions"),
                hlo_utils=importlib.import_module("neuronx_distributed.trace.hlo_utils"),
                mappings=importlib.import_module("neuronx_distributed.parallel_layers.mappings"),
                artifacts=importlib.import_module("neuronx_distributed.trace.model_builder_utils"),
                nxd_model=importlib.import_module("neuronx_distributed.trace.nxd_model.nxd_model"),
                parallel=importlib.import_module("neuronx_distributed.trace.parallel_context"),
                metaneff=importlib.import_module("torch_neuronx.proto.metaneff_pb2"),
                structure=importlib.import_module("torch_neuronx.xla_impl.structure"),
                tracing=importlib.import_module("torch_neuronx.xla_impl.trace"),
            )
    except ImportError as error:
        raise BackendUnavailableError(
            f"The neuron back end needs the Neuron SDK; importing it failed: {error}.", INSTALL
        ) from error
    if wrong := differences():
        raise BackendUnavailableError(
            "The installed neuronx_distributed is called differently than the one this back end was "
            f"written for: {'; '.join(wrong[:3])}.",
            INSTALL,
        )
    return sdk


@cache
def calls() -> dict[str, dict[str, Any]]:
    """Dotted name → recorded call: `parameters` in order, each [name, kind, has a default]."""
    text = resources.files("gemma_neuron.data").joinpath("neuron", "calls.json").read_text()
    found: dict[str, dict[str, Any]] = json.loads(text)["calls"]
    return found


def differences() -> list[str]:
    """Where the importable NxD takes other parameters than recorded; empty when all agree."""
    wrong = []
    for name, recorded in calls().items():
        try:
            found = parameters(_member(name))
        except (ImportError, AttributeError) as error:
            wrong.append(f"{name} is missing ({error})")
            continue
        missing = [p for p in recorded["parameters"] if p not in found]
        surplus = [p[0] for p in found if p not in recorded["parameters"] and not p[2]]
        if missing or surplus:
            wrong.append(
                f"{name} takes ({', '.join(p[0] for p in found)}), recorded "
                f"({', '.join(p[0] for p in recorded['parameters'])})"
            )
    return wrong


def parameters(member: Any) -> list[list[Any]]:
    """[name, kind, has a default] of a function's parameters, or of a class's constructor's."""
    target = member.__init__ if inspect.isclass(member) else member
    signature = inspect.signature(target)
    return [
        [p.name, p.kind.name.lower(), p.default is not inspect.Parameter.empty]
        for p in signature.parameters.values()
    ]


def _member(dotted: str) -> Any:
    """The object a recorded name means: the longest importable module, then its attributes."""
    module, _, rest = dotted.partition(":")
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


def _without_hf_tracer() -> None:
    """Let NxD import beside transformers 5, which no longer has the `HFTracer` its pipeline module names.

    NxD imports the name whenever transformers is there, for training code that nothing here reaches.
    """
    name = "transformers.utils.fx"
    if importlib.util.find_spec("transformers") is None or name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ImportError:
        shim = ModuleType(name, "Stands in for a module that transformers 5 removed.")
        shim.__dict__["HFTracer"] = type("HFTracer", (), {})
        sys.modules[name] = shim
