"""How many units may be compiled at once in a host's memory.

A compiler left to itself is started once for each bucket: on 96 vCPUs all of them, past any host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import psutil

from gemma_neuron.backends.base import PortPart
from gemma_neuron.models.view import rank_view

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
TRACER_BYTES = 950_000_000
"""A process with torch, torch_xla and a graph of some thousand nodes: 0.83 to 1.1 GB over the bundled model and
slices of five sizes, by `scripts/lowering-check`, which holds the slice of the 31B to 15 % of the prediction."""
WEIGHT_COPIES, STATE_COPIES = 1, 2
"""What tracing holds of a rank's tensors: the tracer's copy on its device of the CPU. The module's own weights are
never touched, so they take no memory; its zeroed states are read once."""
COMPILER_BYTES = 4 * 2**30
"""A compiler with a small graph. A stated basis, not a measurement."""
COMPILER_BYTES_PER_COLUMN = 12 * 2**20
"""More for each token of a graph, at COLUMN_LAYERS layers. From the public reports: a 60-layer prefill of 8,192
compiled within 128 GB of host memory and one of 16,384 did not."""
COLUMN_LAYERS = 60
HEADROOM = 0.9
"""Share of what is free that compilers may be planned to take."""


def host_bytes() -> int:
    """Memory that is free for compilers now, all of this process's own subtracted."""
    return psutil.virtual_memory().available


def traced_bytes(part: PortPart) -> int:
    """Peak of the process that traces one unit: nothing but one rank's shapes is ever made."""
    weights = sum(
        prod(p.local_shape) * ITEM_BYTES[p.dtype or part.spec.dtype] for p in part.plan.parameters
    )
    view = rank_view(part.geometry, part.plan, part.spec)
    states = sum(
        prod(shape) * ITEM_BYTES[part.spec.dtype] for shape in view.state_shapes().values()
    )
    return TRACER_BYTES + WEIGHT_COPIES * weights + STATE_COPIES * states


def unit_bytes(part: PortPart) -> int:
    """What tracing and compiling one unit is planned to take on the host."""
    columns = part.unit.batch * part.unit.length
    graph = COMPILER_BYTES_PER_COLUMN * columns * len(part.plan.layers) // COLUMN_LAYERS
    return traced_bytes(part) + COMPILER_BYTES + graph


def at_once(parts: Sequence[PortPart], cores: int, available: int) -> int:
    """At least 1: a single compile that does not fit is the guard's to end, not the plan's to refuse."""
    largest = max(unit_bytes(part) for part in parts)
    return max(1, min(len(parts), cores, int(HEADROOM * available) // largest))
