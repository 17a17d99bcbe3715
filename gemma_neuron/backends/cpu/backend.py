"""The cpu back end behind the `Backend` protocol; torch is imported only to trace, compile or load."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemma_neuron.artifacts import digest_json, source_digest
from gemma_neuron.backends.base import (
    BackendStatus,
    BuiltUnit,
    Check,
    Limits,
    PortPart,
    Runner,
    TracedUnit,
    UnitSpec,
)
from gemma_neuron.backends.cpu.toolchain import find_compiler, host_key
from gemma_neuron.errors import CompilerMissingError
from gemma_neuron.machine import cpu_capability

if TYPE_CHECKING:
    from gemma_neuron.backends.cpu.compiler import Traced
    from gemma_neuron.port import Port

INSTALL_COMPILER = "apt-get install g++, dnf install gcc-c++ or xcode-select --install"
GRAPH_SOURCES = (
    "models",
    "backends/cpu",
    "backends/tensors.py",
    "collectives.py",
    "geometry.py",
    "plan.py",
)

COMPILER_BASE_BYTES = 800 * 2**20
COMPILER_LAYER_BYTES = 20 * 2**20
"""One worker with its C++ compiler, resident. Measured were at most 868 MiB with 6 layers, 1,000 with 12, 1,146 with 24
and 1,903 with 60 (a tiny Gemma 4 at tp 8, torch 2.13). Weights are untouched pages there, widths only literals."""


def spin_less() -> None:
    """Let OpenMP's threads give up a busy core soon; must run before torch is loaded.

    At its default of 300,000 turns, one other busy process made a validation of 10 s take over 200 s on two
    cores; at 10,000 it takes 26 s beside two such processes, and an idle machine shows no difference.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


class CpuBackend:
    """See `backends.base.Backend`."""

    name = "cpu"
    optimises_layout = False
    keeps_devices = False
    preload = ("torch",)
    compile_preload = (*preload, "gemma_neuron.backends.cpu.compiler_modules")

    def probe(self) -> BackendStatus:
        try:
            compiler = find_compiler()
        except CompilerMissingError as error:
            return BackendStatus(name=self.name, usable=False, reason=error.message)
        facts = {"cxx": compiler.version, "capability": cpu_capability()}
        return BackendStatus(name=self.name, usable=True, facts=facts)

    def require(self) -> None:
        find_compiler()

    def host_bytes(self, part: PortPart) -> int:
        return COMPILER_BASE_BYTES + len(part.geometry.layers) * COMPILER_LAYER_BYTES

    def inputs(self, part: PortPart) -> tuple[UnitSpec, ...]:
        return ()

    def shortcut_key(self, part: PortPart) -> dict[str, str]:
        return {
            "source": source_digest(*GRAPH_SOURCES),
            "geometry": digest_json(part.geometry.to_json()),
            "plan": part.plan.fingerprint(),
            "state": f"slots {part.spec.slots}, context {part.spec.max_context}",
            "shape": part.unit.name,
            "dtype": part.spec.dtype,
            **host_key(),
        }

    def trace(self, part: PortPart) -> Traced:
        from gemma_neuron.backends.cpu.compiler import trace

        return trace(part.geometry, part.plan, part.spec, part.unit)

    def compile(self, traced: TracedUnit, folder: Path, limits: Limits) -> BuiltUnit:
        from gemma_neuron.backends.cpu.compiler import Traced, compile_traced

        return compile_traced(cast(Traced, traced), folder)

    def require_room(self, port: Port, replicas: int) -> None:
        pass  # replicas share the cores

    def load(self, port: Port, replica: int = 0) -> Runner:
        spin_less()
        from gemma_neuron.backends.cpu.runner import CpuRunner

        return CpuRunner(port)

    def checks(self) -> list[Check]:
        status = self.probe()
        facts = ", ".join(f"{key} {value}" for key, value in status.facts.items())
        return [
            Check(
                name="back end cpu",
                status="ok" if status.usable else "fail",
                found=facts or status.reason,
                needed="a C++ compiler with OpenMP",
                remedy="" if status.usable else INSTALL_COMPILER,
            )
        ]

    def versions(self) -> dict[str, str]:
        return {"torch": importlib.metadata.version("torch")}


BACKEND = CpuBackend()
