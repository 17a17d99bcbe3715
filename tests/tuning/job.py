"""A run of `tune` on a tiny model in this process, and what its events say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import json_lines
from gemma_neuron.pipeline.tuning import TuneRequest, tuned
from gemma_neuron.tuning.plan import Progress, Tuned
from tests.elastic.test_engine import gone

STEPS = 14
ORPHAN_BOUND = 2.0
Look = Callable[[Progress], None]


class Job:
    """A run in a folder of its own."""

    def __init__(self, model: Path, data: Path, out: Path) -> None:
        self.model, self.out = model, out
        self.source = str(model)
        self.told: list[str] = []
        self.asked = TuneRequest(
            data=data, out=out, replicas=2, threads=1, steps=STEPS, batch=3, save_every=4, dropout=0.1
        )  # fmt: skip

    def run(self, look: Look = lambda _: None, **more: Any) -> Tuned:
        request = replace(self.asked, **more)
        return tuned(self.source, request, notice=self.told.append, look=look)

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in json_lines(self.out / "events.jsonl") if e["event"] in names]

    def pids(self) -> dict[int, int]:
        """Rank → process of its last worker."""
        return {e["rank"]: e["worker_pid"] for e in self.events("worker_started")}

    def require_no_orphan(self) -> None:
        assert all(gone(e["worker_pid"], ORPHAN_BOUND) for e in self.events("worker_started"))

    @property
    def adapter(self) -> bytes:
        return (self.out / "adapter_model.safetensors").read_bytes()

    def losses(self) -> dict[int, set[float]]:
        """Step → the losses it gave, each time it was done."""
        found: dict[int, set[float]] = {}
        for line in json_lines(self.out / "losses.jsonl"):
            found.setdefault(line["step"], set()).add(line["loss"])
        return found


def write_data(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(5):
            talk = [
                {"role": "user", "content": f"What is {number}?"},
                {"role": "assistant", "content": f"It is number {number}." * (1 + number % 2)},
            ]
            file.write(json.dumps({"messages": talk}) + "\n")
    return path
