"""What runs workers, told apart from where: one protocol, one conformance suite (tests/elastic).

A worker is a process with a rank. It answers one call at a time: `call` starts it, `wait` gives the answers and
the faults as they come. A fault is an outcome, never an exception out of `wait`: the caller decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemma_neuron.elastic.faults import ReplicaDownError

HEARTBEAT_SECONDS = 0.5
DEADLINE_SECONDS = 10.0
"""Silence that counts as hung: Pathways' figure. Below the longest call that holds the interpreter (loading,
tracing) it would kill the living; such phases say so themselves (`WorkerContext.phase`)."""
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is. `name` is shown; `environment` is set before anything of ours runs in it."""

    rank: int
    name: str
    deadline: float = DEADLINE_SECONDS
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHandle:
    """A running worker. Its pid on its own machine; handles are compared by identity."""

    spec: WorkerSpec
    pid: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One thing that happened: a call's `answer`, what it raised (`error`), or what befell the worker
    (`fault`; the worker is gone and its handle with it, but for CollectiveAborted, which it raised itself)."""

    handle: WorkerHandle
    answer: Any = None
    error: Exception | None = None
    fault: ReplicaDownError | None = None


class WorkerContext(Protocol):
    """What a called function sees of its worker; first argument of every call."""

    rank: int
    state: dict[str, Any]
    """Kept from call to call: a model, an optimiser."""

    def phase(self, doing: str, deadline: float | None = None) -> None:
        """Say what comes now, and how long it may go without a heartbeat (None: the spec's deadline)."""


class Engine(Protocol):
    """Starts, calls, watches and ends workers."""

    def spawn(self, spec: WorkerSpec) -> WorkerHandle:
        """A new worker, ready for calls. Raises ReplicaDownError when it dies or hangs while starting."""

    def call(self, handle: WorkerHandle, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin `function(context, *arguments)` there: a module-level function, plain values."""

    def wait(self, handles: Sequence[WorkerHandle], timeout: float | None = None) -> list[Outcome]:
        """At least one outcome of these workers, or none once `timeout` seconds have passed."""

    def busy(self, handle: WorkerHandle) -> bool:
        """Whether a call's outcome has not been taken by `wait` yet."""

    def has(self, handle: WorkerHandle) -> bool:
        """Whether a worker is there, as far as `wait` has told: False once its end was an outcome, or it was killed."""

    def kill(self, handle: WorkerHandle) -> None:
        """End a worker and everything it started; returns when it is gone."""

    def capacity(self) -> int:
        """How many more workers could be started now."""

    def close(self) -> None:
        """End all workers."""
