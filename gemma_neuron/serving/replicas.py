"""Keeps replicas alive: processes of the elastic engine, replaced when they die, hang or fail.

A lost replica is an exception here (`elastic_retry` catches it), its requests move at once, and a new process takes
its place: pause-and-resume with one replica, going on with the others where there are more.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from gemma_neuron.elastic.engine import Engine, Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import (
    ElasticRuntimeError,
    ReplicaDownError,
    ScaleUpSignalError,
    WorkerHung,
)
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.elastic.retry import ElasticRetryLimit, RetryPolicy
from gemma_neuron.serving.links import Link
from gemma_neuron.serving.pool import Pool
from gemma_neuron.serving.replica import ReplicaFailed, ReplicaSetup, serve_replica

WAIT_SECONDS = 0.25
MONITOR_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Before a replica that went down without ever having served is loaded again: doubled each time."""
KEEPER_SECONDS = 5.0
"""For the keeper to see what has become of a replica that hung up."""
LOAD_TRIES = 3
"""Loads in a row that may fail while no other replica serves, before the server gives up."""
RETRY_HINT = "See the port's events.jsonl."
log = logging.getLogger(__name__)


class _Closing(Exception):
    """Told to close while waiting for a replica to start."""


class Replicas(Pool):
    """`count` replicas of one port and the requests over them. `engine` is this object's from now on."""

    def __init__(
        self, count: int, setup: ReplicaSetup, engine: Engine, events: EventLog | None = None
    ) -> None:
        super().__init__(count, tokenizer_file=setup.tokenizer_file, stop_ids=setup.stop_ids)
        self._setup, self._events = setup, events or EventLog()
        specs = [
            WorkerSpec(rank=i, name=f"replica {i}", deadline=setup.load_seconds)
            for i in range(count)
        ]
        self._manager = Manager(engine, specs, self._events, independent=True)
        self._by_handle: dict[WorkerHandle, Link] = {}
        self._begun: set[WorkerHandle] = set()
        self._failures = [0] * count
        self._not_before = [0.0] * count
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="replicas", daemon=True)
        self._folder = Path(tempfile.mkdtemp(prefix="gemma-neuron-"))
        self._address, self._key = str(self._folder / "replicas"), secrets.token_bytes(32)
        self._close_seconds = 0.0

    def start(self) -> None:
        """See `TokenSource.start`."""
        self._started = True
        self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """Every request ends at once; replicas are told to end and waited for, and killed after `seconds`."""
        self._close_seconds = 30.0 if seconds is None else seconds
        self._closing.set()
        self.end_all()
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the keeper's thread -------------------------------------------------------------------------

    def _keep(self) -> None:
        listener = Listener(self._address, family="AF_UNIX", backlog=16, authkey=self._key)
        for _ in range(self._count):  # one that is stopped while it calls keeps no other waiting
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._manager.start_monitoring(MONITOR_SECONDS)
        watch = self._manager.elastic_retry(
            minimum_replica_count=1,
            poll_interval=FIRST_PAUSE,
            retry_policy=RetryPolicy(failures=ElasticRetryLimit(None)),
            meanwhile=self._end_where_closing,
            tells_resumed=True,
        )(self._watch)
        try:
            with suppress(_Closing):
                watch()
            self._say_goodbye()
            self.fail(None, "stopped")
        except BaseException as error:
            if isinstance(error, TimeoutError):
                error = ElasticRuntimeError(f"No replica could be started: {error}", RETRY_HINT)
            self.fail(error, "failed")
        finally:
            self._closing.set()
            self._manager.close()
            for _ in range(self._count):
                with suppress(OSError), socket.socket(socket.AF_UNIX) as last:
                    last.connect(self._address)  # wakes a thread that accepts
            listener.close()

    def _end_where_closing(self) -> None:
        if self._closing.is_set():
            raise _Closing

    def _accept(self, listener: Listener) -> None:
        """Replicas call here when they begin to load; each says its pid first."""
        while not self._closing.is_set():
            try:
                connection = listener.accept()
                _, pid = connection.recv()
            except Exception:
                self._closing.wait(0.05)
                continue
            self._attach(connection, pid)

    def _attach(self, connection: Connection, pid: int) -> None:
        for link in list(self._by_handle.values()):
            if link.pid == pid:
                link.attach(connection, self.heard, self._gone)
                return
        connection.close()

    def _gone(self, link: Link) -> None:
        """A replica hung up. The keeper knows why and moves its requests; where it waits for another, they move now."""
        if not link.down.wait(KEEPER_SECONDS) and not self._closing.is_set():
            self.lost(link, f"Replica {link.index} hung up.")

    def heard(self, link: Link, message: Any) -> None:
        super().heard(link, message)
        if message[0] == "loaded":
            self._failures[link.index] = 0
            facts = {"rank": link.index, "worker_pid": link.pid}
            self._events.emit("replica_ready", **facts, restarts=self._starts[link.index] - 1)
            self._events.resumed(replicas=sum(s.phase == "ready" for s in self.states()))

    def _watch(self) -> None:
        """Until told to close. Raises what befell a replica, and ScaleUpSignalError when one can come back."""
        self._adopt()
        while not self._closing.is_set():
            self._begin_due()
            outcomes = self._manager.engine.wait(self._manager.workers, WAIT_SECONDS)
            faults = [fault for outcome in outcomes if (fault := self._judge(outcome)) is not None]
            for fault in faults[1:]:
                self._manager.mark_down(fault)
            if faults:
                raise faults[0]
            if self._manager.available_inactive_replicas:
                raise ScaleUpSignalError("A replica can be started again.")
            if not self._manager.workers:
                self._closing.wait(WAIT_SECONDS)

    def _adopt(self) -> None:
        """A link for each new process."""
        for handle in self._manager.workers:
            if handle not in self._by_handle:
                link = Link(handle.spec.rank, handle.pid)
                self._by_handle[handle] = link
                self.joined(link)

    def _begin_due(self) -> None:
        """Let new processes load, those that failed before after a pause."""
        for handle in self._manager.workers:
            index = handle.spec.rank
            if handle not in self._begun and time.monotonic() >= self._not_before[index]:
                self._begun.add(handle)
                self._by_handle[handle].enter("loading")
                self._manager.engine.call(
                    handle, serve_replica, self._setup, index, self._address, self._key
                )

    def _judge(self, outcome: Outcome) -> ReplicaDownError | None:
        """The fault that an outcome is, its requests moved; raises when nothing can be kept alive."""
        fault = outcome.fault
        index, pid = outcome.handle.spec.rank, outcome.handle.pid
        if fault is None:
            text = "ended by itself" if outcome.error is None else f"failed: {outcome.error}"
            fault = ReplicaFailed(f"Replica {index} {text}.", rank=index, pid=pid)
            fault.__cause__ = outcome.error
        link = self._by_handle.pop(outcome.handle)
        self._begun.discard(outcome.handle)
        name = "worker_hung" if isinstance(fault, WorkerHung) else "worker_died"
        self._events.emit(name, **fault.facts(), phase=link.phase, why=fault.message)
        never_served = link.limits is None
        self.lost(link, fault.message)
        if never_served:
            self._failures[index] += 1
            pause = FIRST_PAUSE * 2 ** (self._failures[index] - 1)
            self._not_before[index] = time.monotonic() + min(pause, LONGEST_PAUSE)
            self._give_up_where_hopeless(fault, index)
        log.warning("%s", fault.message)
        return fault

    def _give_up_where_hopeless(self, fault: ReplicaDownError, index: int) -> None:
        """Raise when no replica serves and loading is an error by itself, or keeps ending."""
        if any(state.phase == "ready" for state in self.states()):
            return
        if fault.__cause__ is not None and self.limits is None:
            raise fault.__cause__
        if self._failures[index] >= LOAD_TRIES:
            raise ElasticRuntimeError(
                f"Replica {index} went down {LOAD_TRIES} times while loading; the last: {fault.message}",
                RETRY_HINT,
            ) from fault

    def _say_goodbye(self) -> None:
        """Ask all replicas to end, and wait for those that serve: a killed one can leave its cores unusable. So can one
        that is killed while it loads; where that matters it is waited for as long as loading may take."""
        patient = self._setup.keeps_devices
        handles = [handle for handle in self._manager.workers if handle in self._begun]
        for handle in handles:
            self._by_handle[handle].send(("close",))
        links = {handle: self._by_handle[handle] for handle in handles}
        waiting = [h for h, x in links.items() if x.phase == "ready" or (patient and x.attached)]
        loading = any(links[handle].phase != "ready" for handle in waiting)
        seconds = self._close_seconds + (self._setup.load_seconds if loading else 0.0)
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            over = self._manager.engine.wait(waiting, WAIT_SECONDS)
            waiting = [handle for handle in waiting if handle not in {o.handle for o in over}]
