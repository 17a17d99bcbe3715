"""When a run that loses replicas gives up: after failures with no commit between them, or for want of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemma_neuron import machine
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import ElasticRuntimeError, WorkerDied, replica_down
from gemma_neuron.errors import DoesNotFitError

OOM_LIMIT = 2
"""Replicas that the kernel killed for want of memory; a third would be killed too."""


@dataclass(slots=True)
class Patience:
    """Counts failures; a commit makes them good. `limit`: failures that are borne."""

    limit: int
    events: EventLog
    oom_kills: Callable[[], int] = machine.oom_kills
    failures: int = 0
    short_of_memory: int = 0
    _commit: int = -1
    _killed: int = field(init=False)

    def __post_init__(self) -> None:
        self._killed = self.oom_kills()

    def count(self, error: Exception, commit: int) -> None:
        """One more failure, the last commit being `commit`. Raises ElasticRuntimeError or DoesNotFitError."""
        if commit != self._commit:
            self.failures = self.short_of_memory = 0
        self._commit = commit
        self.failures += 1
        fault = replica_down(error)
        why = fault.message if fault is not None else str(error)
        before, self._killed = self._killed, self.oom_kills()
        if isinstance(fault, WorkerDied) and self._killed > before:
            self.short_of_memory += 1
            self.events.emit("oom_killed", **fault.facts(), why=why)
        if self.short_of_memory >= OOM_LIMIT:
            raise DoesNotFitError(
                f"The kernel killed {self.short_of_memory} replicas for want of memory since the commit of step "
                f"{commit}; the last: {why}",
                "Use fewer --replicas, a shorter --max-length or a machine with more memory.",
            ) from error
        if self.failures > self.limit:
            raise ElasticRuntimeError(
                f"Gave up after {self.failures} failures since the commit of step {commit}; the last: {why}",
                "events.jsonl has each of them; the same command goes on from the commit.",
            ) from error
