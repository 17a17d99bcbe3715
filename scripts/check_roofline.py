"""Fits the decode expectation to the published runs and says how far off it is for each, left out.

Left out is not one run but all runs of its model on its chip: other contexts of the same port would give the answer
away. The fit is least squares of log(predicted / published) over three constants, by a pattern search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.instances import instance
from gemma_neuron.models.registry import read_parameter_table
from gemma_neuron.models.sizes import size_geometry
from gemma_neuron.sharding.memory import kv_bytes_per_rank
from gemma_neuron.sharding.placement import place
from gemma_neuron.sharding.roofline import (
    RUNS,
    Constants,
    constants,
    published,
    step_bytes,
    step_seconds,
)

ROOT = Path(__file__).parents[1]
MEDIAN_BAR = 0.20
COVERED = 0.9
"""Share of left-out runs that the interval must hold."""
SMALLEST_STEP = 1e-7
STORED_WITHIN = 1e-3
BYTES_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One published run, with the bytes a rank reads in a step."""

    facts: dict[str, Any]
    weight_bytes: int
    kv_bytes: int
    layers: int

    @property
    def series(self) -> tuple[str, str]:
        return self.facts["model"], instance(self.facts["instance"]).chip

    @property
    def name(self) -> str:
        f = self.facts
        return f"{f['model']} {f['instance']} tp {f['tp']} b{f['batch']} {f['context']}"

    @property
    def seconds(self) -> float:
        """As published."""
        return float(self.facts["step_ms"]) / 1000

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + int(self.facts["batch"]) * self.kv_bytes

    @property
    def bound_seconds(self) -> float:
        return self.step_bytes / instance(self.facts["instance"]).hbm_bytes_s_per_core

    def predicted(self, fitted: Constants) -> float:
        """Seconds of a step by `fitted`."""
        where = instance(self.facts["instance"])
        count, bandwidth = self.step_bytes, where.hbm_bytes_s_per_core
        return step_seconds(fitted, where.neuroncore, bandwidth, count, self.layers)


def read_runs() -> list[Run]:
    """The table's runs with their bytes derived from the models' shapes."""
    table = published()
    return [_run(facts, table["models"][facts["model"]]) for facts in table["runs"]]


def _run(facts: dict[str, Any], shape: dict[str, Any]) -> Run:
    tp, context = facts["tp"], facts["context"]
    if "size" in shape:
        geometry = size_geometry(shape["size"])
        plan = place(geometry, read_parameter_table(geometry), tp, "replicate-kv")
        kv = kv_bytes_per_rank(geometry, plan, context, 1, "bfloat16")
        # The runs' experts were read as routed; what our graphs read is another count.
        weights = step_bytes(geometry, plan, context, 1, "bfloat16").must - kv
        return Run(facts, weights, kv, len(geometry.layers))
    layers, hidden, width = shape["layers"], shape["hidden"], shape["head_dim"]
    kv_heads = max(shape["kv_heads"] / tp, 1)
    rows = (2 * shape["query_heads"] / tp + 2 * kv_heads) * width + 3 * shape["intermediate"] / tp
    weights = BYTES_PER_WEIGHT * hidden * (layers * rows + shape["vocab"] / tp)
    kv = BYTES_PER_WEIGHT * layers * 2 * kv_heads * width * context
    return Run(facts, round(weights), round(kv), layers)


def fit(runs: Sequence[Run], start: Constants) -> Constants:
    """The constants that minimise the squares of log(predicted / published), from `start`."""
    names = sorted(start.efficiency)
    best = [*(start.efficiency[name] for name in names), start.layer_seconds * 1000]
    steps = [0.05] * len(best)
    cost = _cost(runs, names, best)
    while max(steps) > SMALLEST_STEP:
        moves = itertools.product((-1, 0, 1), repeat=len(best))
        points = [[b + m * s for b, m, s in zip(best, move, steps, strict=True)] for move in moves]
        least, point = min((_cost(runs, names, p), p) for p in points)
        if least < cost:
            best, cost = point, least
        else:
            steps = [s / 2 for s in steps]
    return _constants(names, best)


def _constants(names: Sequence[str], values: Sequence[float]) -> Constants:
    return Constants(
        efficiency=dict(zip(names, values, strict=False)),
        layer_seconds=values[-1] / 1000,
        spread=1.0,
        runs=0,
    )


def _cost(runs: Sequence[Run], names: Sequence[str], values: Sequence[float]) -> float:
    if min(values[:-1]) <= 0 or values[-1] < 0:
        return math.inf
    tried = _constants(names, values)
    return sum(math.log(run.predicted(tried) / run.seconds) ** 2 for run in runs)


def left_out(runs: Sequence[Run], whole: Constants) -> list[float]:
    """For each run, seconds predicted by a fit without the runs of its model on its chip."""
    fits = {
        series: fit([run for run in runs if run.series != series], whole)
        for series in {run.series for run in runs}
    }
    return [run.predicted(fits[run.series]) for run in runs]


def spread(runs: Sequence[Run], predicted: Sequence[float]) -> float:
    """The factor that holds `COVERED` of the left-out runs, up or down."""
    logs = sorted(abs(math.log(p / run.seconds)) for run, p in zip(runs, predicted, strict=True))
    return math.exp(logs[math.ceil(COVERED * len(logs)) - 1])


def speed_errors(runs: Sequence[Run], predicted: Sequence[float]) -> list[float]:
    """Relative errors of the predicted tokens per second; above 0 is too fast."""
    return [run.seconds / p - 1 for run, p in zip(runs, predicted, strict=True)]


def write(runs: Sequence[Run], whole: Constants, factor: float) -> None:
    """Put bytes and constants into the table."""
    table = published()
    for run, facts in zip(runs, table["runs"], strict=True):
        facts |= {"layers": run.layers, "weight_bytes": run.weight_bytes, "kv_bytes": run.kv_bytes}
    table["constants"] = {
        "efficiency": {name: round(v, 4) for name, v in whole.efficiency.items()},
        "layer_seconds": round(whole.layer_seconds, 8),
        "spread": round(factor, 3),
    }
    lists = {"runs", "excluded"}
    parts = [f'"about": {json.dumps(table["about"])}']
    for key in ("models", "runs", "excluded", "constants"):
        rows = table[key]
        if key in lists:
            body = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        else:
            lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
            body = "{\n" + ",\n".join(lines) + "\n }"
        parts.append(f'"{key}": {body}')
    path = ROOT / "gemma_neuron" / "data" / RUNS
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store bytes and constants")
    asked = parser.parse_args()
    runs, stored = read_runs(), constants()
    whole = fit(runs, stored)
    predicted = left_out(runs, whole)
    errors = speed_errors(runs, predicted)
    factor = spread(runs, predicted)
    print(
        f"{'run':44} {'published':>15} {'bound':>7} {'left out':>9} {'error':>6}   tok/s a sequence"
    )
    for run, seconds, error in zip(runs, predicted, errors, strict=True):
        print(
            f"{run.name:44} {1 / run.seconds:15.1f} {1 / run.bound_seconds:7.1f} {1 / seconds:9.1f} "
            f"{error:+6.0%}   {run.facts['published']}"
        )
    for row in published()["excluded"]:
        print(f"not taken: {row['run']}: {row['reason']}")
    gemma = [abs(e) for run, e in zip(runs, errors, strict=True) if "gemma" in run.facts["model"]]
    median = statistics.median(map(abs, errors))
    shares = ", ".join(f"{name} {value:.1%}" for name, value in whole.efficiency.items())
    print(
        f"{len(runs)} runs of {len({run.series for run in runs})} models and chips; constants: {shares} of the "
        f"bandwidth, {whole.layer_seconds * 1e6:.0f} us a layer\n"
        f"left out: median error {median:.1%} (bar {MEDIAN_BAR:.0%}), of the {len(gemma)} Gemma runs "
        f"{statistics.median(gemma):.1%}, worst {max(map(abs, errors)):.0%}; nine of ten within a factor of "
        f"{factor:.2f}"
    )
    if asked.write:
        write(runs, whole, factor)
    elif not same(whole, factor, stored):
        print(
            "the stored constants are not those of the runs beside them: scripts/check-roofline --write"
        )
        return 1
    return 0 if median <= MEDIAN_BAR else 1


def same(whole: Constants, factor: float, stored: Constants) -> bool:
    """Whether the stored constants are the fitted ones, to rounding."""
    pairs = [
        (factor, stored.spread),
        (whole.layer_seconds, stored.layer_seconds),
        *((whole.efficiency[name], stored.efficiency[name]) for name in whole.efficiency),
    ]
    return all(math.isclose(a, b, rel_tol=STORED_WITHIN) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
