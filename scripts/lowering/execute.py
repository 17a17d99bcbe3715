"""The lowered graphs of each family's tiny model, run on the CPU client at one rank, against stock transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from gemma_neuron.backends.base import CompileSpec
from gemma_neuron.pipeline import shard
from gemma_neuron.pipeline.request import CompileRequest
from gemma_neuron.port import Port
from scripts.checks import Failed
from tests.families import write_family
from tests.stock import stock_logits

BAR = 1e-4
"""Largest difference of a logit, relative to the largest: float32 rounding with room."""
PROMPT, STEPS, BUCKET, WINDOW = 20, 3, 24, 8


def executed(ask: Callable[[dict[str, Any]], Any], family: str, work: Path) -> str:
    """Prefill a prompt beyond the window, then a few decode steps; each call a process, states through files.

    Raises Failed when a logit differs too much.
    """
    name = family.lower()
    source = write_family(work / f"tiny-{name}", family, sliding_window=WINDOW)
    port = Port(work / f"port-{name}")
    shard(str(source), CompileRequest(out=port.path, backend="", tp=1), None)
    spec = CompileSpec(
        backend="neuron", dtype="float32", slots=1, max_context=48, buckets=(BUCKET,)
    )
    text = [2, *np.random.default_rng(0).integers(300, 500, PROMPT + STEPS - 1).tolist()]
    (want,) = stock_logits(source, [text])
    decode, prefill, _ = spec.graphs()
    fields = asdict(spec)
    del fields["backend"]
    common = {
        "config": json.loads((source / "config.json").read_text()),
        "tp": 1,
        "rank": 0,
        "strategy": "replicate-kv",
        "spec": fields,
        "weights": str(port.rank_file(0)),
        "out": str(work / "out.safetensors"),
        "new_states": str(work / "states.safetensors"),
    }
    padded = text[:PROMPT] + [0] * (BUCKET - PROMPT)
    places = [*range(PROMPT), *[0] * (BUCKET - PROMPT)]
    calls = [(prefill, padded, places, PROMPT)]
    calls += [(decode, [text[p]], [p], 1) for p in range(PROMPT, PROMPT + STEPS)]
    worst, states = 0.0, ""
    for unit, tokens, positions, length in calls:
        inputs = {"tokens": [tokens], "positions": [positions], "slots": [0], "lengths": [length]}
        ask(common | {"unit": asdict(unit), "inputs": inputs, "states": states})
        states = common["new_states"]
        got = load_file(common["out"])["out.0"][0]
        last = positions[length - 1]
        worst = max(worst, float(np.abs(got - want[last]).max()) / float(np.abs(want).max()))
    if worst >= BAR:
        raise Failed(f"logits differ by {worst:.1e} of the largest")
    return f"{len(calls)} calls, largest difference {worst:.1e} of the largest logit"
