"""Goes on after faults in the same process, as pathwaysutils' elastic manager does for TPU slices.

A replica is one worker of an engine. `elastic_retry` waits until there are enough, runs the function, and when
a replica is lost, a notice comes or replicas came back, lets it begin again, within budgets. What it begins
from is the function's own affair: the newest committed state, listed anew each time.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from gemma_neuron.elastic.engine import Engine, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import (
    CollectiveAborted,
    ElasticRuntimeError,
    PreemptionNotice,
    ReplicaDownError,
    ScaleUpSignalError,
    replica_down,
)
from gemma_neuron.elastic.retry import ElasticEventKind, RetryPolicy

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
EventCallback = Callable[[ElasticEventKind, Exception], None]
POLL_SECONDS = 10.0
TIMEOUT_SECONDS = 300.0
SURVIVOR_SECONDS = 2.0
"""A survivor that destroys its process group on the first error is out in 20 ms (140 of 140 in under 1 s)."""


class Manager:
    """Keeps `specs`' replicas alive on `engine`. Controller-side; one thread calls it, one may monitor.

    `independent`: no replica waits for another (serving), so the fault of one leaves the others' calls as they are;
    otherwise survivors have to leave the call that broke.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Sequence[WorkerSpec],
        events: EventLog | None = None,
        *,
        independent: bool = False,
    ) -> None:
        self.engine, self.events = engine, events or EventLog()
        self._independent = independent
        self._specs = {spec.rank: spec for spec in specs}
        self._active: dict[int, WorkerHandle] = {}
        self._available: frozenset[int] = frozenset()
        self.survivor_seconds = SURVIVOR_SECONDS
        """What survivors of a broken call have to leave it, before they are ended."""
        self._stop = threading.Event()
        self._monitor: threading.Thread | None = None

    @property
    def all_replica_indices(self) -> frozenset[int]:
        return frozenset(self._specs)

    @property
    def active_replica_indices(self) -> frozenset[int]:
        return frozenset(self._active)

    @property
    def inactive_replica_indices(self) -> frozenset[int]:
        return self.all_replica_indices - self.active_replica_indices

    @property
    def available_inactive_replicas(self) -> frozenset[int]:
        """Inactive replicas there is capacity for again; filled by the monitor, which interrupts nothing."""
        return self._available & self.inactive_replica_indices

    @property
    def workers(self) -> list[WorkerHandle]:
        """The active replicas' handles, by index."""
        return [self._active[index] for index in sorted(self._active)]

    def start_monitoring(self, poll_interval: float = POLL_SECONDS) -> None:
        """Look for capacity for inactive replicas every `poll_interval` seconds, in a thread."""
        if self._monitor is None:
            self._monitor = threading.Thread(
                target=self._watch, args=(poll_interval,), name="elastic-monitor", daemon=True
            )
            self._monitor.start()

    def _watch(self, poll_interval: float) -> None:
        while not self._stop.wait(poll_interval):
            room = self.engine.capacity()
            self._available = frozenset(sorted(self.inactive_replica_indices)[:room])

    def close(self) -> None:
        """Stop monitoring and end all replicas."""
        self._stop.set()
        if self._monitor is not None:
            self._monitor.join()
        self.engine.close()
        self._active.clear()

    def mark_down(self, fault: ReplicaDownError) -> None:
        """The replica the fault names is inactive from now on; what is left of it is ended."""
        handle = self._active.pop(fault.rank, None)
        if handle is not None:
            self.engine.kill(handle)

    def wait_for_replicas(
        self,
        minimum: int,
        poll_interval: float,
        timeout: float | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start replicas until at least `minimum` are active; all there is room for. Raises TimeoutError, and what
        `meanwhile`, called between two tries, raises."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._independent:
            self._settle()
        while True:
            self._fill()
            if len(self._active) >= minimum:
                return
            if end is not None and time.monotonic() + poll_interval > end:
                raise TimeoutError(
                    f"{len(self._active)} of {minimum} replicas were active after {timeout:g} s."
                )
            meanwhile()
            time.sleep(poll_interval)

    def _settle(self) -> None:
        """Before beginning again: survivors leave the broken call within `survivor_seconds` or are ended, and
        those that died unseen are inactive."""
        end = time.monotonic() + self.survivor_seconds
        # One look at the workers may have told of several ends, of which the attempt raised one.
        self._active = {index: h for index, h in self._active.items() if self.engine.has(h)}
        while self._active:
            left = end - time.monotonic()
            busy = [handle for handle in self.workers if self.engine.busy(handle)]
            for outcome in self.engine.wait(busy or self.workers, max(0.0, left) if busy else 0.0):
                fault = outcome.fault
                if fault is not None and not isinstance(fault, CollectiveAborted):
                    self.mark_down(fault)
            if not busy:
                return
            if left <= 0:
                for handle in busy:
                    self.engine.kill(handle)
                    self._active.pop(handle.spec.rank, None)

    def _fill(self) -> None:
        for index in sorted(self.inactive_replica_indices):
            if self.engine.capacity() < 1:
                return
            try:
                self._active[index] = self.engine.spawn(self._specs[index])
            except ReplicaDownError as fault:
                self.events.emit("worker_died", **fault.facts(), phase="start")
                return
            self.events.emit("worker_started", rank=index, worker_pid=self._active[index].pid)
        self._available = frozenset()

    def elastic_retry(
        self,
        minimum_replica_count: int | None = None,
        poll_interval: float = POLL_SECONDS,
        timeout: float | None = TIMEOUT_SECONDS,
        retry_policy: RetryPolicy | None = None,
        pre_callback: Callable[[], None] | None = None,
        on_elastic_event_callback: EventCallback | None = None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        tells_resumed: bool = False,
    ) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
        """Decorate a function that uses `workers`. None waits for all (pause-and-resume), a number goes on
        with so many (replica-resize). Raises ElasticRuntimeError when a budget is spent, TimeoutError when too
        few replicas come; everything else the function raises goes through unchanged.

        `meanwhile`: called while replicas are waited for. `tells_resumed`: the function itself says by
        `events.resumed` when work goes on, since much is to be restored before it does.
        """
        minimum = len(self._specs) if minimum_replica_count is None else minimum_replica_count
        policy = retry_policy or RetryPolicy()
        if not 1 <= minimum <= len(self._specs):
            raise ValueError(
                f"minimum_replica_count {minimum} is not between 1 and {len(self._specs)}."
            )

        def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
            @functools.wraps(function)
            def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
                spent: dict[ElasticEventKind, int] = {}
                while True:
                    self.wait_for_replicas(minimum, poll_interval, timeout, meanwhile)
                    if pre_callback is not None:
                        pre_callback()
                    if not tells_resumed:
                        self.events.resumed(replicas=len(self._active))
                    try:
                        return function(*args, **kwargs)
                    except Exception as error:
                        kind = self._react(error)
                        if kind is None:
                            raise
                        self._spend(kind, error, spent, policy, on_elastic_event_callback)

            return run

        return decorate

    def _react(self, error: Exception) -> ElasticEventKind | None:
        """What kind of elastic event an error is, its replica marked; None for an ordinary error."""
        fault = replica_down(error)
        if fault is not None:
            self.events.down()
            if not isinstance(fault, CollectiveAborted):
                self.mark_down(fault)
            return "failure"
        if isinstance(error, ScaleUpSignalError):
            self.events.down()
            return "scale_up"
        if isinstance(error, PreemptionNotice) and error.replica is not None:
            self.events.down()
            handle = self._active.pop(error.replica, None)
            if handle is not None:
                self.engine.kill(handle)
            return "preemption"
        return None  # a notice for this machine too: nothing can go on here

    def _spend(
        self,
        kind: ElasticEventKind,
        error: Exception,
        spent: dict[ElasticEventKind, int],
        policy: RetryPolicy,
        callback: EventCallback | None,
    ) -> None:
        """Take one from the kind's budget. Raises ElasticRuntimeError when it was the last."""
        spent[kind] = spent.get(kind, 0) + 1
        fault = replica_down(error)
        facts = {} if fault is None else fault.facts()
        self.events.emit("retry", kind=kind, attempt=spent[kind], why=str(error), **facts)
        if callback is not None:
            callback(kind, error)
        if not policy.limit(kind).allows(spent[kind]):
            raise ElasticRuntimeError(
                f"Gave up after {spent[kind]} {kind.replace('_', '-')} events; the last: {error}",
                "See events.jsonl for each of them.",
            ) from error
