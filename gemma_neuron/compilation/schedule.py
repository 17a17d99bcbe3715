"""Which units are built now, by which workers, and what follows when one of them fails.

A unit is tried in a worker of its own. A fault (the worker died or hung) or a compiler that ended for no reason
of the graph's leads to another try in a fresh worker; the same end twice poisons the unit. Want of memory is no fault
of a unit that had company: it is built again alone. None of this touches the other units: they are independent,
so there is nothing to wind back, and what `Manager.elastic_retry` does for jobs that share state would
throw away their work here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gemma_neuron.artifacts import FULL, writing_failed
from gemma_neuron.compilation.conditions import Conditions
from gemma_neuron.elastic.engine import Engine, Outcome, WorkerContext, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import NodeLost, ReplicaDownError, WorkerHung
from gemma_neuron.elastic.metadata import DISABLED
from gemma_neuron.elastic.retry import PoisonWatch, RetryPolicy
from gemma_neuron.errors import CompileError, CompilerFaultError, GemmaNeuronError, Interrupted


class Task(Protocol):
    """What is scheduled: one unit. `log`: where its worker prints."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> Path: ...


KERNEL = "killed by the kernel"
Job = TypeVar("Job", bound=Task)
Result = TypeVar("Result")


@dataclass(slots=True)
class Running(Generic[Job]):
    """One try of one unit. `company`: other units ran at some time beside it."""

    job: Job
    handle: WorkerHandle
    company: bool
    since: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def pid(self) -> int:
        return self.handle.pid

    def facts(self) -> dict[str, object]:
        return {
            "unit": self.name,
            "rank": self.handle.spec.rank,
            "worker_pid": self.pid,
            "seconds": round(time.monotonic() - self.since, 3),
            "host_peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True, slots=True)
class Finished(Generic[Job, Result]):
    """A unit that came to its end, and the peak of its worker's tree in bytes."""

    job: Job
    result: Result
    host_peak_bytes: int


@dataclass(frozen=True, slots=True)
class GivenUp(Generic[Job]):
    """A unit that did not. `host_peak_bytes`: what it took at least, where memory was the reason, else 0."""

    job: Job
    error: GemmaNeuronError
    host_peak_bytes: int = 0


class Schedule(Generic[Job, Result]):
    """Calls `work(context, job)` on `engine`, at most `most_at_once` together. The caller closes the engine."""

    def __init__(
        self,
        engine: Engine,
        events: EventLog,
        work: Callable[[WorkerContext, Job], Result],
        conditions: Conditions,
        most_at_once: int,
    ) -> None:
        self.most_at_once = most_at_once
        self.failed: list[GivenUp[Job]] = []
        self._engine, self._events, self._work = engine, events, work
        self._conditions, self._memory = conditions, conditions.memory
        self._closing = False
        self._waiting: list[Job] = []
        self._alone: set[str] = set()
        self._running: dict[WorkerHandle, Running[Job]] = {}
        self._poison, self._policy = PoisonWatch(), RetryPolicy()
        self._tries: dict[str, int] = {}
        self._ranks: dict[str, int] = {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Finished[Job, Result]]:
        """Units in order of completion. When one fails for good the others go on; then its error is raised.

        Raises Interrupted when this run has to end before its work does.
        """
        self._waiting = list(jobs)
        self._ranks = {job.name: rank for rank, job in enumerate(jobs)}
        try:
            while self._waiting or self._running:
                self._leave_in_time()
                self._admit()
                yield from self._ended(
                    self._engine.wait(list(self._running), self._memory.poll_seconds)
                )
                if self._memory.watch(list(self._running.values())):
                    self._make_room()
        except Interrupted:
            # What has come to its end by now is kept.
            yield from self._ended(self._engine.wait(list(self._running), 0.0))
            raise
        finally:
            for handle in list(self._running):
                self._engine.kill(handle)
            self._running.clear()
        if self.failed:
            raise self._verdict()

    def _leave_in_time(self) -> None:
        """Raise Interrupted when it is time to go: a signal, a notice's end, or nothing left but what is too long."""
        ending = self._conditions.notices.ending()
        if ending is not None:
            self._closing = True
            error, until = ending
            if not self._running or time.monotonic() >= until:
                raise error
        elif self._waiting and not self._running and self._next() is None:
            if self._conditions.notices.outlook == "rebalance":
                left = ", ".join(job.name for job in self._waiting)
                raise Interrupted(
                    f"EC2 recommends leaving this instance; too long to be started here: {left}.",
                    f"Run the same command on another instance; {DISABLED}=true builds them here all the same.",
                )
            time.sleep(self._memory.poll_seconds)

    def _admit(self) -> None:
        while (job := self._next()) is not None:
            self._waiting.remove(job)
            self._tries[job.name] = self._tries.get(job.name, 0) + 1
            spec = WorkerSpec(rank=self._ranks[job.name], name=job.name)
            try:
                handle = self._engine.spawn(spec)
            except ReplicaDownError as fault:
                if isinstance(fault, NodeLost):
                    self._no_place(job, fault)
                    return
                facts = {**fault.facts(), "unit": job.name, "seconds": 0.0}
                self._again(job, fault, fault.signature, facts)
                continue
            running = Running(job, handle, company=bool(self._running))
            for other in self._running.values():
                other.company = True
            self._running[handle] = running
            self._events.emit("worker_started", attempt=self._tries[job.name], **running.facts())
            self._events.resumed(unit=job.name)
            self._engine.call(handle, self._work, job)

    def _no_place(self, job: Job, fault: NodeLost) -> None:
        """There is no machine for one more: from now on fewer at once. Raises the fault when there is none at all."""
        self._events.emit("no_place", **fault.facts(), unit=job.name, why=fault.message)
        if not self._running:
            raise fault
        self.most_at_once = len(self._running)
        self._tries[job.name] -= 1
        self._waiting.insert(0, job)

    def _next(self) -> Job | None:
        """The unit to start now, if any: those that need the memory for themselves come last."""
        running = list(self._running.values())
        full = len(running) >= self.most_at_once or any(r.name in self._alone for r in running)
        if full or self._closing:
            return None
        startable = [job for job in self._waiting if not self._conditions.puts_off(job.name)]
        for job in startable:
            if job.name not in self._alone:
                return job if self._memory.admits(job.name, running) else None
        return startable[0] if startable and not running else None

    def _ended(self, outcomes: Sequence[Outcome]) -> Iterator[Finished[Job, Result]]:
        for outcome in outcomes:
            running = self._running.pop(outcome.handle)
            if outcome.fault is None:
                # It has answered; its end frees its memory, whatever its libraries still hold.
                self._engine.kill(outcome.handle)
            error = outcome.fault or outcome.error
            if error is None:
                running.job.log.unlink(missing_ok=True)
                yield Finished(running.job, outcome.answer, running.peak_bytes)
            else:
                self._take_up(running, error)

    def _take_up(self, running: Running[Job], error: Exception) -> None:
        """Decide what follows from how a try ended."""
        job, facts = running.job, running.facts()
        passing = isinstance(error, ReplicaDownError | CompilerFaultError)
        if passing and self._memory.killed_by_kernel():
            self._events.emit("oom_killed", **facts, why=str(error))
            # A unit that had no company may have died of what others on the machine took: once it is tried again.
            again = running.company or not self._poison.count(job.name, KERNEL)
            self._short_of_memory(running, KERNEL, again=again, least=running.peak_bytes)
        elif isinstance(error, CompilerFaultError) and error.of_memory and running.company:
            # Alone it would be another matter: "killed" is all such a compiler says, and anyone may have killed it.
            self._events.emit("compiler_failed", **facts, signature=error.signature, why=str(error))
            self._short_of_memory(running, error.signature, again=True)
        elif isinstance(error, ReplicaDownError | CompilerFaultError):
            self._again(job, error, error.signature, facts)
        else:
            if isinstance(error, OSError) and error.errno in FULL:
                error = writing_failed(Path(error.filename or job.log.parent), error)
            if not isinstance(error, GemmaNeuronError):
                broke = f"Compiling {job.name} broke: {type(error).__name__}: {error}"
                error = CompileError(broke, "This is a bug; please report it.")
            self._events.emit("unit_failed", **facts, why=error.message)
            _note(job, error)
            self.failed.append(GivenUp(job, error))

    def _make_room(self) -> None:
        """Stop the unit that was started last: it has the least to lose."""
        youngest = max(self._running.values(), key=lambda running: running.since)
        del self._running[youngest.handle]
        self._engine.kill(youngest.handle)
        self._events.emit(
            "stopped_for_memory", **youngest.facts(), total_bytes=self._memory.total_bytes
        )
        least = max(youngest.peak_bytes, self._memory.budget_bytes)
        self._short_of_memory(youngest, "stopped", again=bool(self._running), least=least)

    def _short_of_memory(
        self, running: Running[Job], how: str, *, again: bool, least: int = 0
    ) -> None:
        """Build it again with the memory for itself, and from now on fewer at once; or give it up if it had that.

        `least`: bytes it is known to want then. What the kernel killed may have wanted less than the budget.
        """
        job = running.job
        if not again:
            error = self._memory.refusal(running, how)
            _note(job, error)
            self.failed.append(GivenUp(job, error, least))
            return
        self._memory.took_more(running)
        self.most_at_once = max(1, len(self._running))
        self._alone.add(job.name)
        self._waiting.append(job)
        self._events.down()
        self._events.emit(
            "retry", unit=job.name, attempt=self._tries[job.name] + 1, why=how, at_once=1
        )

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
        lost = isinstance(error, NodeLost)  # says nothing of the unit, twice neither
        twice = not lost and self._poison.count(job.name, signature)
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
        self.failed.append(GivenUp(job, poisoned))

    def _verdict(self) -> GemmaNeuronError:
        """The first failure, naming the other units that failed too."""
        first, *others = self.failed
        if others:
            first.error.message += f" Failed too: {', '.join(other.job.name for other in others)}."
            first.error.args = (first.error.message,)
        return first.error


def _note(job: Task, error: GemmaNeuronError) -> None:
    """What the controller saw, at the end of what the worker printed; where that was on another machine, its notes."""
    with job.log.open("a", encoding="utf-8") as log:
        log.writelines(f"{text}\n" for text in getattr(error, "__notes__", ()))
        log.write(f"{type(error).__name__}: {error.message}\n")
