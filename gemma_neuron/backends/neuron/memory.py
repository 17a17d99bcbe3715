"""How many units may be compiled at once in a host's memory.

A compiler left to itself is started once for each bucket: on 96 vCPUs all of them, past any host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import psutil

from gemma_neuron.backends.base import PortPart

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
TRACED_COPIES = 2
"""Of one rank's weights while it is traced: the module's, and the tracer's own on its device of the CPU."""
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


def unit_bytes(part: PortPart) -> int:
    """What tracing and compiling one unit is planned to take on the host."""
    own = sum(
        prod(p.local_shape) * ITEM_BYTES[p.dtype or part.spec.dtype] for p in part.plan.parameters
    )
    columns = part.unit.batch * part.unit.length
    layers = len(part.plan.layers)
    graph = COMPILER_BYTES_PER_COLUMN * columns * layers // COLUMN_LAYERS
    return TRACED_COPIES * own + COMPILER_BYTES + graph


def at_once(parts: Sequence[PortPart], cores: int, available: int) -> int:
    """At least 1: a single compile that does not fit is the guard's to end, not the plan's to refuse."""
    largest = max(unit_bytes(part) for part in parts)
    return max(1, min(len(parts), cores, int(HEADROOM * available) // largest))
