"""How long compiling took elsewhere, against how long spot instances are kept; and the cheaper way. No torch.

Compile time follows the graph and the compiler's version more than any formula we could defend, so the nearest
published run is shown for what it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import log
from typing import Any

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.sizes import size_of

RUNS = "compile_runs.json"
ROUTE = (
    "compile on a CPU host (neuronx-cc needs no accelerator), mirror the port to S3, serve it on Inferentia2: a "
    "taken instance then costs a download, and no accelerator waits for a compiler"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRun:
    """One published compile."""

    size: str
    tp: int
    instance: str
    bucket: int
    minutes: float
    note: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTime:
    """The nearest published compile beside the spot window. `same_size`: it compiled this model."""

    run: CompileRun
    same_size: bool
    usual_minutes: tuple[int, int]
    longest_minutes: int

    @property
    def fits_usual_window(self) -> bool:
        return self.run.minutes <= self.usual_minutes[0]

    @property
    def route(self) -> str:
        return ROUTE

    def to_json(self) -> dict[str, Any]:
        return {
            "nearest_published": asdict(self.run),
            "same_size": self.same_size,
            "spot_window_minutes": {
                "usual": list(self.usual_minutes),
                "longest": self.longest_minutes,
            },
            "fits_usual_window": self.fits_usual_window,
            "route": self.route,
        }


@cache
def _published() -> dict[str, Any]:
    text = resources.files("gemma_neuron.data").joinpath(RUNS).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def compile_time(geometry: ModelGeometry, tp: int, chip: str) -> CompileTime:
    """The published compile nearest to this port: same size first, then same kind of instance, then degree."""
    size, spot = size_of(geometry), _published()["spot"]
    runs = [CompileRun(**row) for row in _published()["runs"]]

    def distance(run: CompileRun) -> tuple[bool, bool, float, float]:
        other_kind = run.instance.startswith("inf2") != (chip == "inferentia2")
        return run.size != size, other_kind, abs(log(run.tp / tp)), -run.minutes

    nearest = min(runs, key=distance)
    return CompileTime(
        run=nearest,
        same_size=nearest.size == size,
        usual_minutes=(spot["usual_minutes"][0], spot["usual_minutes"][1]),
        longest_minutes=spot["longest_minutes"],
    )
