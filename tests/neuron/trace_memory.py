"""`python -m tests.neuron.trace_memory UNIT`: the host memory that tracing a graph of six layers of the 31B takes at
tp 8, as one JSON line.

No weights are needed: a graph has shapes alone. One process a graph, as `compile` has it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from gemma_neuron.backends.base import CompileSpec, PortPart
from gemma_neuron.backends.neuron import environment, sdk
from gemma_neuron.backends.neuron.memory import TRACER_BYTES, traced_bytes
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.port import Port
from gemma_neuron.sharding.placement import place
from tests.sizes import size_config

LAYERS, TP = 6, 8
SPEC = CompileSpec(
    backend="neuron", dtype="bfloat16", slots=2, max_context=8192, buckets=(128,), layout=False
)
UNITS = {unit.name: unit for unit in SPEC.graphs()}


def main(name: str) -> None:
    from gemma_neuron.backends.neuron.tracer import trace

    geometry = read_geometry(size_config("31B", LAYERS))
    plan = place(geometry, read_parameter_table(geometry), TP, "replicate-kv")
    part = PortPart(
        geometry=geometry, plan=plan, spec=SPEC, unit=UNITS[name], port=Port(Path("nowhere"))
    )
    environment.for_compiling()
    sdk.load()
    before = peak()
    traced = trace(part)
    found = {
        "added_bytes": peak() - before,
        "predicted_bytes": traced_bytes(part) - TRACER_BYTES,
        "base_bytes": before,
        "graph_bytes": traced.trace.hlo.ByteSize(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


def peak() -> int:
    """Most resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(sys.argv[1])
