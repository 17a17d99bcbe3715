"""Which units are built now, by which workers, and what follows when one of them fails.

A unit is tried in a worker of its own. A fault (the worker died or hung) or a compiler that ended for no reason
of the graph's leads to another try in a fresh worker; the same end twice poisons the unit. Neither touches the other
units: units are independent, so there is nothing to wind back, and what `Manager.elastic_retry` does for jobs
that share state would throw away their work here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gemma_neuron.elastic.engine import Engine, Outcome, WorkerContext, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import ReplicaDownError, WorkerHung
from gemma_neuron.elastic.retry import PoisonWatch, RetryPolicy
from gemma_neuron.errors import CompileError, CompilerFaultError, GemmaNeuronError

POLL_SECONDS = 0.25


class Task(Protocol):
    """What is scheduled: one unit. `log`: where its worker prints."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> Path: ...


Job = TypeVar("Job", bound=Task)
Result = TypeVar("Result")


@dataclass(slots=True)
class Running(Generic[Job]):
    """One try of one unit."""

    job: Job
    handle: WorkerHandle
    since: float = field(default_factory=time.monotonic)

    def facts(self) -> dict[str, object]:
        return {
            "unit": self.job.name,
            "rank": self.handle.spec.rank,
            "worker_pid": self.handle.pid,
            "seconds": round(time.monotonic() - self.since, 3),
        }


class Schedule(Generic[Job, Result]):
    """Calls `work(context, job)` on `engine`, at most `most_at_once` together. The caller closes the engine."""

    def __init__(
        self,
        engine: Engine,
        events: EventLog,
        work: Callable[[WorkerContext, Job], Result],
        most_at_once: int,
    ) -> None:
        self.most_at_once = most_at_once
        self._engine, self._events, self._work = engine, events, work
        self._waiting: list[Job] = []
        self._running: dict[WorkerHandle, Running[Job]] = {}
        self._poison, self._policy = PoisonWatch(), RetryPolicy()
        self._tries: dict[str, int] = {}
        self._failed: list[tuple[Job, GemmaNeuronError]] = []

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
        """Results in order of completion. When a unit fails for good the others go on; then its error is raised."""
        self._waiting = list(jobs)
        ranks = {job.name: rank for rank, job in enumerate(jobs)}
        try:
            while self._waiting or self._running:
                self._admit(ranks)
                for outcome in self._engine.wait(list(self._running), POLL_SECONDS):
                    running = self._running.pop(outcome.handle)
                    result = self._taken(running, outcome)
                    if result is not None:
                        yield running.job, result
        finally:
            for handle in list(self._running):
                self._engine.kill(handle)
            self._running.clear()
        if self._failed:
            raise self._verdict()

    def _admit(self, ranks: dict[str, int]) -> None:
        while self._waiting and len(self._running) < self.most_at_once:
            job = self._waiting.pop(0)
            self._tries[job.name] = self._tries.get(job.name, 0) + 1
            spec = WorkerSpec(rank=ranks[job.name], name=job.name)
            try:
                handle = self._engine.spawn(spec)
            except ReplicaDownError as fault:
                self._again(job, fault, fault.signature, {**fault.facts(), "unit": job.name})
                continue
            running = Running(job, handle)
            self._running[handle] = running
            self._events.emit("worker_started", attempt=self._tries[job.name], **running.facts())
            self._events.resumed(unit=job.name)
            self._engine.call(handle, self._work, job)

    def _taken(self, running: Running[Job], outcome: Outcome) -> Result | None:
        """What a worker left: its result, or None when the unit is tried again or given up."""
        job, facts = running.job, running.facts()
        fault, error = outcome.fault, outcome.error
        if fault is not None:
            self._again(job, fault, fault.signature, facts)
            return None
        # It has answered; its end frees its memory, whatever its libraries still hold.
        self._engine.kill(outcome.handle)
        if isinstance(error, CompilerFaultError):
            self._again(job, error, error.signature, facts)
        elif isinstance(error, GemmaNeuronError):
            self._give_up(job, error, facts)
        elif error is not None:
            broke = f"Compiling {job.name} broke: {type(error).__name__}: {error}"
            self._give_up(job, CompileError(broke, "This is a bug; please report it."), facts)
        else:
            result: Result = outcome.answer
            job.log.unlink(missing_ok=True)
            return result
        return None

    def _again(
        self, job: Job, error: GemmaNeuronError, signature: str, facts: dict[str, object]
    ) -> None:
        """Put the unit back for another try, unless this was the same end twice or one too many."""
        self._events.down()
        kind = "worker_died" if isinstance(error, ReplicaDownError) else "compiler_failed"
        kind = "worker_hung" if isinstance(error, WorkerHung) else kind
        self._events.emit(kind, **facts, signature=signature, why=error.message)
        _note(job, error)
        tries = self._tries[job.name]
        twice = self._poison.count(job.name, signature)
        if not twice and self._policy.failures.allows(tries):
            self._events.emit("retry", unit=job.name, attempt=tries + 1, why=signature)
            self._waiting.insert(0, job)
            return
        how = f"twice in the same way ({signature})" if twice else f"{tries} times"
        self._events.emit("poisoned", unit=job.name, attempts=tries, signature=signature)
        poisoned = CompileError(
            f"{job.name} failed {how}; the last: {error.message}",
            f"{error.hint} Its log is {job.log}; units that are done stay.".strip(),
        )
        poisoned.__cause__ = error
        self._failed.append((job, poisoned))

    def _give_up(self, job: Job, error: GemmaNeuronError, facts: dict[str, object]) -> None:
        """An error that another try would meet again."""
        self._events.emit("unit_failed", **facts, why=error.message)
        _note(job, error)
        self._failed.append((job, error))

    @property
    def failed(self) -> tuple[tuple[Job, GemmaNeuronError], ...]:
        """Units given up, with why."""
        return tuple(self._failed)

    def _verdict(self) -> GemmaNeuronError:
        """The first failure, naming the other units that failed too."""
        (_, first), *others = self._failed
        if others:
            first.message += f" Failed too: {', '.join(job.name for job, _ in others)}."
            first.args = (first.message,)
        return first


def _note(job: Task, error: GemmaNeuronError) -> None:
    """What the controller saw, at the end of what the worker printed."""
    with job.log.open("a", encoding="utf-8") as log:
        log.write(f"{type(error).__name__}: {error.message}\n")
