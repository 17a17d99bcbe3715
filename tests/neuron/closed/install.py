"""Put the stand-ins where NxD imports the closed packages from. Called by the packages in `tests/neuron/packages`."""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

PLATFORM = "NEURON_PLATFORM_TARGET_OVERRIDE"


class Recorded:
    """A name nothing here needs: it can be imported, subclassed and used as a decorator, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorded()

    def __getitem__(self, key: Any) -> Any:
        return Recorded()


class OpenType(type):
    """Members of a placeholder class are placeholders."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorded()


class OpenModule(ModuleType):
    """A closed package: members that were not written here are placeholders, submodules come into being."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # a package, so that modules below it are looked for
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = OpenType(name, (Recorded,), {})
        setattr(self, name, placeholder)
        return placeholder


class OpenFinder:
    """Finds any submodule of the closed packages that was not installed: NxD's training code names many."""

    packages = ("torch_neuronx", "torch_xla", "libneuronxla", "neuronxcc", "nki", "nkilib")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        top = name.partition(".")[0]
        if top not in self.packages or name == top or name.endswith("._pre_prod_kernels"):
            return None
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return OpenModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def provide(package: str) -> None:
    """Fill an imported top-level package. Submodules NxD's inference code uses are written, others open."""
    if not any(isinstance(finder, OpenFinder) for finder in sys.meta_path):
        sys.meta_path.append(OpenFinder())
    sys.modules[package].__class__ = OpenModule
    filling = {
        "torch_neuronx": _torch_neuronx,
        "torch_xla": _torch_xla,
        "libneuronxla": _libneuronxla,
    }
    if package in filling:
        filling[package]()
    if package == "neuronxcc":
        _module("neuronxcc.nki._private_kernels.collectives", CollectivesConfig=CollectivesConfig)


class CollectivesConfig:
    """parallel_state.py asks it for each rank's neighbours in a group's ring."""

    def __init__(self, replica_groups: list[list[int]]) -> None:
        pairs = {
            rank: [[group[i - 1], rank], [rank, group[(i + 1) % len(group)]]]
            for group in replica_groups
            for i, rank in enumerate(group)
        }
        self.rank_src_tgt_pairs = [pairs[rank] for rank in sorted(pairs)]


def _module(name: str, **members: Any) -> ModuleType:
    """A module in `sys.modules`, its parents too, each an attribute of its parent."""
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(name) or OpenModule(name)
    sys.modules[name] = module
    if parent:
        setattr(_module(parent), last, module)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def platform_target(flags: str = "") -> str:
    """`--target` in the flags, else the override, else what the machine is: inf2 for a process that claimed cores."""
    found = re.search(r"--target[= ](\w+)", flags or "")
    machine = "inf2" if "NEURON_RT_VISIBLE_CORES" in os.environ else ""
    target = found[1] if found else os.environ.get(PLATFORM, machine)
    if not target:
        raise RuntimeError("unable to determine the platform of this host")
    return target


def _torch_neuronx() -> None:
    import torch

    from tests.neuron.closed import protos, runtime, tracing

    _module("torch_neuronx", __version__="2.9.0.2.15.32035")
    _module("torch_neuronx.pyhlo.hlo_pb2", Kind=SimpleNamespace(MUST_ALIAS=protos.MUST_ALIAS))
    _module("torch_neuronx.pyhlo.hlo_pb2", **protos.MESSAGE)
    _module("torch_neuronx.pyhlo.xla_data_pb2", PrimitiveType=SimpleNamespace(TUPLE=protos.TUPLE))
    kinds = SimpleNamespace(**{k: getattr(protos.MetaTensor, k) for k in protos.TENSOR_KINDS})
    tensor = type("MetaTensor", (), {"Type": kinds})
    _module("torch_neuronx.proto.metaneff_pb2", MetaNeff=protos.MetaNeff, MetaTensor=tensor)
    public = {k: v for k, v in vars(tracing).items() if not k.startswith("_")}
    _module("torch_neuronx.xla_impl.trace", **public)
    _module("torch_neuronx.xla_impl.structure", Flattener=tracing.Flattener, Packer=tracing.Packer)
    for name in ("torch_neuronx.utils", "torch_neuronx.utils.utils"):
        _module(name, get_platform_target=platform_target, SUPPORTED_TYPES=["inf2", "trn1"])
    classes: Any = torch.classes
    classes.neuron = SimpleNamespace(
        SPMDModel=runtime.SPMDModel, LayoutTransformation=runtime.LayoutTransformation
    )
    operators: Any = torch.ops.neuron
    operators._parallel_load = runtime.parallel_load
    _devices_of_ranks(torch)


def _devices_of_ranks(torch: Any) -> None:
    """`torch.zeros(..., device="privateuseone:3")` (base_nxd_model.py) on the CPU: no such device is registered."""
    from torch.utils._device import _device_constructors

    assert (
        torch.zeros in _device_constructors()
    )  # cached: `with torch.device(…)` goes on to see the real one
    zeros = torch.zeros

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("privateuseone:"):
            kwargs["device"] = "cpu"
        return zeros(*args, **kwargs)

    torch.zeros = on_cpu


def _torch_xla() -> None:
    from tests.neuron.closed import collectives

    _module(
        "torch_xla.core.xla_model",
        REDUCE_SUM="sum",
        REDUCE_MAX="max",
        REDUCE_MIN="min",
        all_reduce=collectives.all_reduce,
        all_gather=collectives.all_gather,
    )
    _module("torch_xla.runtime", world_size=lambda: 1)


def _libneuronxla() -> None:
    from tests.neuron.closed import compilers

    _module(
        "libneuronxla",
        neuron_xla_compile=compilers.neuron_xla_compile,
        neuron_xla_wlo_compile=compilers.neuron_xla_wlo_compile,
    )
