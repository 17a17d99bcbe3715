"""The neuron back end behind the `Backend` protocol; torch and the SDK are imported only to trace, compile or load."""

from __future__ import annotations

import shutil
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
from gemma_neuron.errors import BackendUnavailableError

if TYPE_CHECKING:
    from gemma_neuron.backends.neuron.tracer import Traced
    from gemma_neuron.port import Port

GRAPH_SOURCES = (
    "models",
    "backends/neuron",
    "backends/tensors.py",
    "collectives.py",
    "geometry.py",
    "plan.py",
)
COMPILER = "neuronx-cc"


class NeuronBackend:
    """See `backends.base.Backend`. Compiling needs no device; loading does."""

    name = "neuron"
    optimises_layout = True
    keeps_devices = True
    preload = compile_preload = ("torch",)

    def probe(self) -> BackendStatus:
        from gemma_neuron.backends.neuron.keys import PACKAGES, versions
        from gemma_neuron.backends.neuron.packages import ALSO_JUDGED, refusal

        found = versions((*PACKAGES, *ALSO_JUDGED))
        reason = refusal(found) or ""
        if not reason and shutil.which(COMPILER) is None:
            reason = f"the compiler {COMPILER} is not on PATH"
        return BackendStatus(name=self.name, usable=not reason, reason=reason, facts=found)

    def require(self) -> None:
        from gemma_neuron.backends.neuron.sdk import INSTALL

        status = self.probe()
        if not status.usable:
            raise BackendUnavailableError(
                f"The neuron back end cannot be used: {status.reason}.", INSTALL
            )

    def host_bytes(self, part: PortPart) -> int:
        from gemma_neuron.backends.neuron.memory import compiler_bytes, traced_bytes

        return traced_bytes(part) + compiler_bytes(part)

    def inputs(self, part: PortPart) -> tuple[UnitSpec, ...]:
        decode = part.spec.decode_unit
        return (decode,) if part.spec.layout and part.unit != decode else ()

    def shortcut_key(self, part: PortPart) -> dict[str, str]:
        from gemma_neuron.backends.neuron.keys import shared_key

        return {
            "source": source_digest(*GRAPH_SOURCES),
            "geometry": digest_json(part.geometry.to_json()),
            "plan": part.plan.fingerprint(),
            "state": f"slots {part.spec.slots}, context {part.spec.max_context}",
            **shared_key(part),
        }

    def trace(self, part: PortPart) -> Traced:
        from gemma_neuron.backends.neuron.tracer import trace

        return trace(part)

    def compile(self, traced: TracedUnit, folder: Path, limits: Limits) -> BuiltUnit:
        from gemma_neuron.backends.neuron.compiler import compile_traced

        return compile_traced(cast("Traced", traced), folder, limits)

    def require_room(self, port: Port, replicas: int) -> None:
        from gemma_neuron.backends.neuron import cores, devices

        cores.require_room(replicas, port.plan.tp, devices.core_count())

    def load(self, port: Port, replica: int = 0) -> Runner:
        self.require()
        from gemma_neuron.backends.neuron.runner import NeuronRunner

        return NeuronRunner(port, replica)

    def checks(self) -> list[Check]:
        from gemma_neuron.backends.neuron.checks import checks

        return checks(self.probe())

    def versions(self) -> dict[str, str]:
        from gemma_neuron.backends.neuron.keys import versions

        return versions()


BACKEND = NeuronBackend()
