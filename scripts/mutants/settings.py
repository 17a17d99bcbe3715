"""How a port under test is cut and run: one setting for all mutants, many for the runs without a fault."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.models.registry import read_geometry
from gemma_neuron.port import Port
from gemma_neuron.validation.questions import FILE_NAME, GENERAL, read_questions, spread
from gemma_neuron.validation.verdict import scope
from tests.eager import eager_port

LEAST_CONTEXT = 1024
PAST_WINDOWS = 128
"""Positions a port has room for past twice its window, so that every edge the validator knows can be looked at."""


@dataclass(frozen=True, slots=True)
class Setting:
    tp: int
    dtype: str = "float32"
    strategy: str = "auto"
    buckets: tuple[int, ...] = (128, 512)
    slots: int = 4

    @property
    def name(self) -> str:
        buckets = "-".join(map(str, self.buckets))
        return f"tp {self.tp}, {self.strategy}, {self.dtype}, {self.slots} slots, buckets {buckets}"


def clean_settings(window: int) -> list[Setting]:
    """Every degree with both dtypes and two sets of buckets; at 8 ranks both ways to share KV heads."""
    ways = [(1, "auto"), (2, "auto"), (4, "auto"), (8, "replicate-kv"), (8, "replicate-global")]
    shapes = [((128, 512), 2), ((max(64, window), max(192, window + 100)), 3)]
    return [
        Setting(tp, dtype, strategy, buckets, slots)
        for (buckets, slots), dtype, (tp, strategy) in product(
            shapes, ("float32", "bfloat16"), ways
        )
    ]


def cut_port(model: Path, out: Path, setting: Setting) -> Port:
    """The port of `model` at `out`, cut and committed; its graphs are to run uncompiled."""
    geometry = read_geometry(json.loads((model / "config.json").read_text(encoding="utf-8")))
    wanted = max(LEAST_CONTEXT, 2 * geometry.window + PAST_WINDOWS)
    return eager_port(
        model,
        out,
        tp=setting.tp,
        strategy=setting.strategy,
        base=load_chat_assets(model).template is None,
        dtype=setting.dtype,
        slots=setting.slots,
        max_context=min(geometry.max_context, wanted),
        buckets=setting.buckets,
        score_length=128,
    )


def setting_of(port: Port) -> Setting:
    spec, plan = port.spec, port.plan
    return Setting(plan.tp, spec.dtype, plan.strategy, spec.buckets, spec.slots)


def fewer_questions(model: Path, count: int, out: Path) -> Path:
    """The model's question set with at most `count` of its scope's questions, of every kind some, written to `out`."""
    source = model / FILE_NAME if (model / FILE_NAME).is_file() else GENERAL
    template = load_chat_assets(model).template
    named = read_questions(source).for_scope(scope(template is not None, False))
    head, *blocks = source.read_text(encoding="utf-8").split("[[questions]]\n")
    chosen = [blocks[int(name[1:])] for name, _ in spread(named, count)]
    out.write_text("[[questions]]\n".join([head, *chosen]), encoding="utf-8")
    return out
