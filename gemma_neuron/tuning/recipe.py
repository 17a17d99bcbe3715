"""What a run is: everything that decides the adapter it ends with, and nothing else.

Two runs with equal recipes over the same base and samples end with equal adapters, on CPUs of one capability, whatever
the number of replicas was and whatever happened to them.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder layer that an adapter may change."""
WARMUP_SHARE = 0.03
"""Of all steps, over which the learning rate rises; then it falls to nothing along half a cosine."""


class Recipe(BaseModel):
    """How samples become an adapter. `steps`: optimiser steps in all; `batch`: samples a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = PROJECTIONS
    dropout: float = 0.0
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    batch: int = 8
    steps: int
    samples: int
    """How many there are; an epoch goes over all of them once, in an order of its own."""
    last: int
    """Samples to go over in all; the last step has fewer than `batch` where it does not divide."""
    seed: int = 0
    dtype: str = "float32"

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        warmup = max(1, round(self.steps * WARMUP_SHARE))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))

    def places(self, step: int) -> range:
        """Positions in the data that step `step` takes, counted over all epochs."""
        return range(step * self.batch, min((step + 1) * self.batch, self.last))

    def indexes(self, step: int) -> list[int]:
        """The samples of step `step`, in the order in which their gradients are summed."""
        found = []
        for place in self.places(step):
            epoch, at = divmod(place, self.samples)
            found.append(_order(self.seed, epoch, self.samples)[at])
        return found


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, samples: int) -> tuple[int, ...]:
    """A permutation that Python's own generator gives alike on every machine and version."""
    order = list(range(samples))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return tuple(order)
