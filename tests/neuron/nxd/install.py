"""Put the stand-in where the product imports NxD from. Called by `tests/neuron/packages/nxd`."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.neuron.nxd import artifacts, layout, model, parallel, units
from tests.neuron.nxd.recorded import MEMBERS, ROOT

RECORDED_BY = (artifacts, layout, model, parallel, units)
"""Importing them records their members."""


def provide() -> None:
    """Fill `sys.modules` with every module a recorded member lies in. Called by `packages/nxd`.

    As the real package does, it names a module of transformers 4 when transformers is installed.
    """
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils.fx import HFTracer  # type: ignore[import-not-found]

        assert HFTracer is not None
    for path, member in MEMBERS.items():
        module, _, name = path.partition(":")
        if "." not in name:
            setattr(_module(f"{ROOT}.{module}"), name, member)


def _module(name: str) -> ModuleType:
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    if parent:
        setattr(_module(parent), last, module)
    return module
