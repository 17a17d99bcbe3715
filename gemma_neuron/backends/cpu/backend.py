"""The cpu back end behind the `Backend` protocol; torch is imported only to trace, compile or load."""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemma_neuron.artifacts import digest_bytes, digest_json
from gemma_neuron.backends.base import (
    BackendStatus,
    BuiltUnit,
    CompileSpec,
    Runner,
    TracedUnit,
    UnitSpec,
)
from gemma_neuron.backends.cpu.toolchain import cpu_capability, find_compiler, host_key
from gemma_neuron.errors import CompilerMissingError

if TYPE_CHECKING:
    from gemma_neuron.backends.cpu.compiler import Traced
    from gemma_neuron.geometry import ModelGeometry
    from gemma_neuron.plan import ShardPlan
    from gemma_neuron.port import Port

PACKAGE_ROOT = Path(__file__).parents[2]
GRAPH_SOURCES = ("models", "backends/cpu", "collectives.py", "geometry.py", "plan.py")


@cache
def source_digest() -> str:
    """Digest of every line of ours that a graph depends on."""
    files: list[Path] = []
    for name in GRAPH_SOURCES:
        path = PACKAGE_ROOT / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return digest_json(
        {str(f.relative_to(PACKAGE_ROOT)): digest_bytes(f.read_bytes()) for f in files}
    )


def spin_less() -> None:
    """Let OpenMP's threads give up a busy core soon; must run before torch is loaded.

    At its default of 300,000 turns, one other busy process made a validation of 10 s take over 200 s on two
    cores; at 10,000 it takes 26 s beside two such processes, and an idle machine shows no difference.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


class CpuBackend:
    """See `backends.base.Backend`."""

    name = "cpu"

    def probe(self) -> BackendStatus:
        try:
            compiler = find_compiler()
        except CompilerMissingError as error:
            return BackendStatus(name=self.name, usable=False, reason=error.message)
        facts = {"cxx": compiler.version, "capability": cpu_capability()}
        return BackendStatus(name=self.name, usable=True, facts=facts)

    def require(self) -> None:
        find_compiler()

    def shortcut_key(
        self, geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec, unit: UnitSpec
    ) -> dict[str, str]:
        return {
            "source": source_digest(),
            "geometry": digest_json(geometry.to_json()),
            "plan": plan.fingerprint(),
            "state": f"slots {spec.slots}, context {spec.max_context}",
            "shape": unit.name,
            "dtype": spec.dtype,
            **host_key(),
        }

    def trace(
        self, geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec, unit: UnitSpec
    ) -> Traced:
        from gemma_neuron.backends.cpu.compiler import trace

        return trace(geometry, plan, spec, unit)

    def compile(self, traced: TracedUnit, folder: Path) -> BuiltUnit:
        from gemma_neuron.backends.cpu.compiler import Traced, compile_traced

        return compile_traced(cast(Traced, traced), folder)

    def load(self, port: Port) -> Runner:
        spin_less()
        from gemma_neuron.backends.cpu.runner import CpuRunner

        return CpuRunner(port)

    def versions(self) -> dict[str, str]:
        return {"torch": importlib.metadata.version("torch")}


BACKEND = CpuBackend()
