"""The default engine: workers are processes of this machine, started from a warm forkserver.

A fork of a server that has torch loaded is ready in milliseconds where a fresh interpreter takes a second, and
inherits nothing of the controller. Death is seen by the process's sentinel, a hang by missing heartbeats.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from gemma_neuron.elastic.child import Pipes, guard, serve
from gemma_neuron.elastic.engine import START_SECONDS, Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.faults import ReplicaDownError, WorkerDied, WorkerHung
from gemma_neuron.elastic.room import Room

REAP_SECONDS = 5.0
GOODBYE_SECONDS = 30.0
"""For a worker without work to end by itself: milliseconds, but where it has driven an accelerator. The cores are given
back only now, and a process that is killed meanwhile can leave them unusable."""
POLL_SECONDS = 0.25
"""How often heartbeats are looked at while nothing else happens."""
EMBEDDED_LIMIT = 1024
WARNINGS = "PYTHONWARNINGS"
WARMING = "gemma_neuron.elastic.warming"
"""Named, not imported: it is for the server alone."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    calls: Connection
    beats: Connection
    lifeline: Connection
    last_beat: float
    deadline: float
    doing: str = "starting"
    busy: bool = True

    def hear(self) -> None:
        """Take in what heartbeats have come; a beat is empty, a phase is `seconds what`."""
        with suppress(EOFError, OSError):
            while self.beats.poll():
                message = self.beats.recv_bytes()
                self.last_beat = time.monotonic()
                if message:
                    seconds, _, self.doing = message.decode().partition(" ")
                    self.deadline = float(seconds)

    def silent(self) -> float:
        return time.monotonic() - self.last_beat


class EmbeddedEngine:
    """Workers on this machine. `limit`: how many there may be at once; `preload`: modules for the server.

    `regrow_seconds`: how long the place of a worker that was ended stays empty. `goodbye_seconds`: for a worker without
    work to end by itself; nothing else is looked at meanwhile.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        limit: int = EMBEDDED_LIMIT,
        regrow_seconds: float = 0.0,
        goodbye_seconds: float = GOODBYE_SECONDS,
    ) -> None:
        self.room = Room(limit, regrow_seconds)
        self.goodbye_seconds = goodbye_seconds
        _quiet_tracker()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([WARMING, *preload])
        self._workers: dict[WorkerHandle, _Worker] = {}
        self._guard: tuple[BaseProcess, Connection] | None = None
        # Before multiprocessing's own exit handler, which waits for children instead of ending them.
        atexit.register(self.close)

    def spawn(self, spec: WorkerSpec) -> WorkerHandle:
        """See `Engine.spawn`. Raises WorkerDied or WorkerHung."""
        calls, their_calls = self._context.Pipe()
        beats, their_beats = self._context.Pipe(duplex=False)
        their_lifeline, lifeline = self._context.Pipe(duplex=False)
        pipes = Pipes(their_calls, their_beats, their_lifeline)
        process = self._context.Process(target=serve, args=(spec, pipes), daemon=False)
        process.start()
        for theirs in (their_calls, their_beats, their_lifeline):
            theirs.close()
        assert process.pid is not None
        handle = WorkerHandle(spec, process.pid)
        worker = _Worker(process, calls, beats, lifeline, time.monotonic(), START_SECONDS)
        self._workers[handle] = worker
        self._tell_guard(f"+{handle.pid}")
        outcome = self.wait([handle], START_SECONDS + POLL_SECONDS)
        if not outcome or outcome[0].fault is not None:
            self._end(handle)
            raise (outcome[0].fault if outcome else None) or _hung(handle, worker)
        worker.deadline, worker.doing = spec.deadline, "idle"
        return handle

    def call(self, handle: WorkerHandle, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Engine.call`. A worker that is gone is told of by `wait`."""
        worker = self._workers[handle]
        worker.doing, worker.busy = getattr(function, "__name__", "a call"), True
        with suppress(OSError):
            worker.calls.send((function, arguments))

    def wait(self, handles: Sequence[WorkerHandle], timeout: float | None = None) -> list[Outcome]:
        """See `Engine.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if end is None else min(POLL_SECONDS, end - time.monotonic())
            known = [handle for handle in handles if handle in self._workers]
            sources: list[Any] = []
            for handle in known:
                worker = self._workers[handle]
                sources += [worker.calls, worker.process.sentinel]
            wait(sources, max(0.0, left))
            found = [outcome for handle in known if (outcome := self._look(handle)) is not None]
            if found or not known or (end is not None and time.monotonic() >= end):
                return found

    def _look(self, handle: WorkerHandle) -> Outcome | None:
        """What has become of one worker since the last look."""
        worker = self._workers[handle]
        worker.hear()
        try:
            if worker.calls.poll():
                kind, value = worker.calls.recv()
                worker.busy = False
                if isinstance(value, ReplicaDownError):
                    kind = "fault"  # said by the worker itself, which is well: a peer left it
                return Outcome(handle, **({} if kind == "ready" else {kind: value}))
        except (EOFError, OSError):
            return Outcome(handle, fault=self._died(handle, worker))
        except Exception as error:
            worker.busy = False
            return Outcome(handle, error=RuntimeError(f"{handle.spec.name}: unreadable: {error}"))
        if worker.process.exitcode is not None:
            return Outcome(handle, fault=self._died(handle, worker))
        if worker.silent() > worker.deadline:
            fault = _hung(handle, worker)
            self._end(handle)
            return Outcome(handle, fault=fault)
        return None

    def _died(self, handle: WorkerHandle, worker: _Worker) -> ReplicaDownError:
        """A worker whose pipe is closed: ended, or about to; with it goes all it started."""
        worker.process.join(REAP_SECONDS)
        code = worker.process.exitcode
        self._end(handle)
        code = worker.process.exitcode if code is None else code
        assert code is not None
        return WorkerDied(rank=handle.spec.rank, pid=handle.pid, code=code, doing=worker.doing)

    def busy(self, handle: WorkerHandle) -> bool:
        """See `Engine.busy`; False for a worker that is gone."""
        return handle in self._workers and self._workers[handle].busy

    def has(self, handle: WorkerHandle) -> bool:
        """See `Engine.has`."""
        return handle in self._workers

    def kill(self, handle: WorkerHandle) -> None:
        """See `Engine.kill`. One that has nothing to do may first put away what its libraries hold."""
        worker = self._workers.get(handle)
        if worker is not None and not worker.busy:
            worker.calls.close()
            worker.process.join(self.goodbye_seconds)
        self._end(handle)

    def _end(self, handle: WorkerHandle) -> None:
        """At once, and the whole session, compilers it started included."""
        worker = self._workers.pop(handle, None)
        if worker is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(handle.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join(REAP_SECONDS)
        self.room.left()
        for pipe in (worker.calls, worker.beats, worker.lifeline):
            pipe.close()
        self._tell_guard(f"-{handle.pid}")

    def _tell_guard(self, message: str) -> None:
        """Started with the first worker. Without it, lifelines still end all but what a stopped worker started."""
        if self._guard is None:
            theirs, ours = self._context.Pipe(duplex=False)
            process = self._context.Process(target=guard, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._guard = process, ours
        with suppress(OSError):
            self._guard[1].send_bytes(message.encode())

    def capacity(self) -> int:
        """Room under `limit`, less the places that stay empty for a while."""
        return self.room.free(len(self._workers))

    def close(self) -> None:
        """End all workers at once."""
        for handle in list(self._workers):
            self.kill(handle)
        if self._guard is not None:
            process, groups = self._guard
            groups.close()
            process.join(REAP_SECONDS)
            process.kill()  # one that is stopped would be waited for until the end of days
            process.join(REAP_SECONDS)
            self._guard = None
        atexit.unregister(self.close)


def _quiet_tracker() -> None:
    """Start Python's resource tracker such that it says nothing of semaphores that killed workers left.

    It removes them at this process's end, which is all there is to do; its warning would be for this process's user,
    who did not make them.
    """
    before = os.environ.get(WARNINGS)
    os.environ[WARNINGS] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[WARNINGS]
        else:
            os.environ[WARNINGS] = before


def _hung(handle: WorkerHandle, worker: _Worker) -> WorkerHung:
    return WorkerHung(
        rank=handle.spec.rank,
        pid=handle.pid,
        silent=worker.silent(),
        deadline=worker.deadline,
        doing=worker.doing,
    )
