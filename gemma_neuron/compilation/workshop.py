"""Where units are compiled: by workers of this machine, or of others; one protocol (`pipeline.cluster` has the other).

A workshop starts the workers, says how many units are compiled at once and what is known of the memory they take, and
hands over each result as files on this machine's disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gemma_neuron.backends.base import Backend, PortPart
from gemma_neuron.compilation import worker
from gemma_neuron.compilation.conditions import HostMemory, Memory
from gemma_neuron.compilation.prediction import Prediction
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import Engine
from gemma_neuron.machine import HostBudget, how_many_fit

Work = Callable[..., Any]
"""(context, job) → what `received` takes: runs in a worker, so it is found by its module there."""


class Workshop(Protocol):
    """See the module. `begin` before each stage, `received` for each answer."""

    work: Work

    def engine(self) -> Engine:
        """Starts the workers. The caller closes it."""

    def begin(self, parts: Sequence[PortPart], expected: Sequence[Prediction]) -> None:
        """Have ready what these units need. Raises what keeps it from being so."""

    def memory(self, expected: dict[str, Prediction]) -> Memory:
        """What admits units and watches what they take."""

    def at_once(self, expected: Sequence[Prediction]) -> int:
        """How many of these units are compiled at once."""

    def threads(self, at_once: int) -> int:
        """How many threads each may compile with."""

    def received(self, part: PortPart, answer: Any) -> worker.UnitResult:
        """The result with its files on this machine's disk."""


class Here:
    """Workers of this machine, within `budget`."""

    def __init__(self, backend: Backend, budget: HostBudget) -> None:
        self.work: Work = worker.run
        self._preload, self._budget = backend.compile_preload, budget

    def engine(self) -> Engine:
        return EmbeddedEngine(preload=[*self._preload, worker.__name__])

    def begin(self, parts: Sequence[PortPart], expected: Sequence[Prediction]) -> None:
        """Nothing: what units need lies in the port."""

    def memory(self, expected: dict[str, Prediction]) -> Memory:
        return HostMemory(
            self._budget, {name: found.host_bytes for name, found in expected.items()}
        )

    def at_once(self, expected: Sequence[Prediction]) -> int:
        fitting = how_many_fit([found.host_bytes for found in expected], self._budget.bytes)
        return min(len(expected), _cores(), fitting)

    def threads(self, at_once: int) -> int:
        return max(1, _cores() // at_once)

    def received(self, part: PortPart, answer: Any) -> worker.UnitResult:
        result: worker.UnitResult = answer
        return result


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
