"""Losses and rates of a run: a line a step for whoever follows it, and the curve for the report.

The curve of the steps before a restart comes from the checkpoint, so that it survives a change of machine.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

from gemma_neuron.tuning.checkpoints import TRAINING_FILE
from gemma_neuron.tuning.record import LOSSES_NAME
from gemma_neuron.tuning.worker import StepDone

WINDOW = 20
"""Steps the rate is taken over."""


class History:
    """Of the run in `out`. `losses[i]`: mean loss over the learned tokens of step i + 1."""

    def __init__(self, out: Path) -> None:
        self.path = out / LOSSES_NAME
        self.losses: list[float] = []
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    @property
    def rate(self) -> float:
        """Samples a second of the last steps."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(samples for samples, _ in self._recent) / seconds if seconds else 0.0

    @property
    def last(self) -> float:
        """Loss of the last step; 0 before there is one."""
        return self.losses[-1] if self.losses else 0.0

    def restore(self, checkpoint: Path | None) -> None:
        """Take the curve up to a verified checkpoint; None for the beginning."""
        self.losses = []
        if checkpoint is not None:
            from safetensors import safe_open

            with safe_open(checkpoint / TRAINING_FILE, framework="np") as file:
                self.losses = file.get_tensor("losses").tolist()

    def add(self, done: StepDone, seconds: float, replicas: int) -> None:
        """Note a step. The line is not fsynced: what counts is in the checkpoints."""
        self.losses.append(done.loss)
        self._recent.append((done.samples, seconds))
        line = {
            "time": round(time.time(), 3),
            "step": done.step + 1,
            "loss": done.loss,
            "tokens": done.tokens,
            "seconds": round(seconds, 4),
            "replicas": replicas,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
