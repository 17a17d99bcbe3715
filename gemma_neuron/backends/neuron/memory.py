"""What tracing and compiling one unit takes of the host's memory: the worker's own and its compiler's. No torch."""

from __future__ import annotations

from math import prod

from gemma_neuron.backends.base import PortPart
from gemma_neuron.models.view import rank_view
from gemma_neuron.models.weights import PER_LAYER_TABLE, TABLE
from gemma_neuron.plan import ITEM_BYTES

TRACER_BYTES = 950_000_000
"""A process with torch, torch_xla and a graph of some thousand nodes. Chosen on the bundled model and slices of five
sizes, whose peaks lie from -14 to +8 % of the prediction; a slice by the other strategy and two sizes of Gemma 3, which
had no part in it, from -9 to +11 %. `scripts/lowering-check` measures them and refuses more than 15 %."""
WEIGHT_COPIES, STATE_COPIES = 1, 2
"""What tracing holds of a rank's tensors: the tracer's copy on its device of the CPU. The module's own weights are
never touched, so they take no memory; its zeroed states are read once."""
COMPILER_BASE_BYTES = 2**30
"""Of a neuronx-cc process, whatever it compiles. An allowance: no published figure tells it."""
COMPILER_BYTES_PER_WEIGHT_BYTE = 1.4
"""neuronx-cc over a decode graph: 7.5 GB resident were reported for E2B on one core, whose graph reads 4.55 GB of
bfloat16 weights (github.com/xbill9/tpu-jax-inf2, runs/2026-07-30-neuron-compile-e2b). Weights are parameters of the
graph: it is the instructions that stream them which take the memory. That graph also unpacked 4-bit weights, which
makes this a cautious figure."""
COMPILER_DOUBLING_TOKENS = 2048
"""Tokens of a prefill bucket that add a decode graph's memory once more. Two runs of the 31B at tp 4 on 128 GiB bound
it, the tracer's memory counted: 8,192 tokens compiled, so it is at least 1,800, and 16,384 did not, so it is at most
3,600 (neuronx-distributed-inference, pull request 106)."""


def traced_bytes(part: PortPart) -> int:
    """Peak of the process that traces one unit: nothing but one rank's shapes is ever made."""
    weights = sum(p.rank_bytes(part.spec.dtype) for p in part.plan.parameters)
    view = rank_view(part.geometry, part.plan, part.spec)
    states = sum(
        prod(shape) * ITEM_BYTES[part.spec.dtype] for shape in view.state_shapes().values()
    )
    return TRACER_BYTES + WEIGHT_COPIES * weights + STATE_COPIES * states


def compiler_bytes(part: PortPart) -> int:
    """Peak of the unit's neuronx-cc process. A stated basis of three published runs, no promise."""
    geometry, unit = part.geometry, part.unit
    looked_up = {PER_LAYER_TABLE} if geometry.tied else {PER_LAYER_TABLE, TABLE}
    streamed = sum(
        p.rank_bytes(part.spec.dtype) for p in part.plan.parameters if p.name not in looked_up
    )
    tokens = unit.batch * unit.length if unit.phase in ("prefill", "score") else 0
    growth = 1 + tokens / COMPILER_DOUBLING_TOKENS
    return COMPILER_BASE_BYTES + int(COMPILER_BYTES_PER_WEIGHT_BYTE * streamed * growth)
