"""A worker's side: one call after another, a heartbeat beside it, and an end when the controller ends.

The lifeline is a pipe whose write end only the controller holds: when it closes, however the controller
ended, the worker's whole group is killed. A worker that is stopped (SIGSTOP) cannot read it, so the kernel
is asked too: it is killed with the process that forked it. What that worker had started is left then, so a
guard, a process beside the workers that does nothing else, kills their groups as well.
"""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gemma_neuron.elastic.engine import HEARTBEAT_SECONDS, WorkerSpec
from gemma_neuron.logs import to_stderr

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
OOM_SCORE = "500"
"""As if the process took half of the memory more than it does; from 0 for an ordinary process to 1000."""


@dataclass(frozen=True, slots=True)
class Pipes:
    """The worker's ends. `beats` carries a JSON line per phase and an empty message per beat."""

    calls: Connection
    beats: Connection
    lifeline: Connection


@dataclass(slots=True)
class Context:
    """`WorkerContext` of the embedded engine."""

    rank: int
    beats: Connection
    deadline: float
    state: dict[str, Any] = field(default_factory=dict)

    def phase(self, doing: str, deadline: float | None = None) -> None:
        """Tell the controller what comes now and how long it may take without a beat, in seconds."""
        seconds = self.deadline if deadline is None else deadline
        with suppress(OSError):
            self.beats.send_bytes(f"{seconds} {doing}".encode())


def serve(spec: WorkerSpec, pipes: Pipes) -> None:
    """A worker's whole life. Ends with its `calls` pipe, or with the controller."""
    with suppress(PermissionError):
        os.setsid()
    _die_with_parent()
    with suppress(OSError):
        # When memory runs out, the kernel shall take a worker, whose work is done again, not the controller.
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    # Ctrl-C goes to the terminal's group, a service manager's notice to all its processes: the controller decides what
    # ends. The notice is handled, not ignored: what a worker starts would go on ignoring it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_to_controller)
    os.environ.update(spec.environment)
    to_stderr()
    threading.Thread(target=_end_with_controller, args=(pipes.lifeline,), daemon=True).start()
    threading.Thread(target=_beat, args=(pipes.beats,), daemon=True).start()
    context = Context(spec.rank, pipes.beats, spec.deadline)
    pipes.calls.send(("ready", os.getpid()))
    while True:
        try:
            function, arguments = pipes.calls.recv()
        except EOFError:
            return
        try:
            reply: tuple[str, Any] = ("answer", function(context, *arguments))
        except Exception as error:
            reply = ("error", error)
        context.phase("idle")
        _send(pipes.calls, reply)


def _leave_to_controller(number: int, frame: object) -> None:
    pass


def _send(calls: Connection, reply: tuple[str, Any]) -> None:
    """Send a reply; an exception that cannot cross as itself crosses as its text."""
    try:
        calls.send(reply)
    except (OSError, BrokenPipeError):
        raise
    except Exception:
        calls.send(("error", RuntimeError(f"{type(reply[1]).__name__}: {reply[1]}")))


def _beat(beats: Connection) -> None:
    pause = threading.Event()
    with suppress(OSError):
        while True:
            beats.send_bytes(b"")
            pause.wait(HEARTBEAT_SECONDS)


def _die_with_parent() -> None:
    """Let the kernel kill this process with the forkserver, which ends with the controller."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _let_server_end()


def _let_server_end() -> None:
    """Close this process's end of the pipe that keeps the forkserver alive.

    A forked process holds one so that it could start more; a stopped one would hold it for ever.
    """
    server: Any = multiprocessing.forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def _end_with_controller(lifeline: Connection) -> None:
    """Blocks until the controller's end closes; then nothing of this worker's group goes on."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def guard(groups: Connection) -> None:
    """Keep a list of process groups, `+pid` and `-pid` a message; when the controller's end closes, kill them."""
    with suppress(PermissionError):
        os.setsid()
    _let_server_end()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    kept: set[int] = set()
    with suppress(EOFError, OSError):
        while True:
            message = groups.recv_bytes().decode()
            (kept.add if message[0] == "+" else kept.discard)(int(message[1:]))
    for pid in kept:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
