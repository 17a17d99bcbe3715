"""Processes for jobs, one each, at most so many at once; none outlives the one that started it.

A worker has a session of its own, so that one kill reaches the compilers it started, and holds the read end of
a pipe whose write end only the controller has: when that end closes, however the controller ended, the
worker's whole group is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from gemma_neuron.errors import CompileError, GemmaNeuronError

Job = TypeVar("Job")
Answer = TypeVar("Answer")
PATIENCE_SECONDS = 5.0


class WorkerPool(Generic[Job, Answer]):
    """Runs `work(job)` in processes; `run` yields answers in order of completion."""

    def __init__(self, work: Callable[[Job], Answer], at_once: int, preload: Sequence[str]) -> None:
        self._work, self._at_once = work, at_once
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._running: dict[Connection, tuple[BaseProcess, Connection, Job]] = {}

    def run(self, jobs: Sequence[Job], name: Callable[[Job], str]) -> Iterator[tuple[Job, Answer]]:
        """Raises what a worker raised (a GemmaNeuronError), or CompileError for one that died or broke."""
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._at_once:
                    self._start(waiting.pop(0))
                for ready in wait(list(self._running)):
                    assert isinstance(ready, Connection)
                    yield self._finish(ready, name)
        finally:
            self._kill_all()

    def _start(self, job: Job) -> None:
        ours, theirs = self._context.Pipe()
        lifeline_read, lifeline_write = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_serve, args=(self._work, job, theirs, lifeline_read), daemon=False
        )
        process.start()
        theirs.close()
        lifeline_read.close()
        self._running[ours] = (process, lifeline_write, job)

    def _finish(self, ready: Connection, name: Callable[[Job], str]) -> tuple[Job, Answer]:
        process, lifeline, job = self._running.pop(ready)
        try:
            answer = ready.recv()
        except EOFError:
            process.join(PATIENCE_SECONDS)
            raise CompileError(
                f"The process compiling {name(job)} {_how_it_ended(process.exitcode)} without an answer.",
                "Run the same command again: committed units stay. If the kernel killed it, memory ran out.",
            ) from None
        finally:
            ready.close()
            # The worker ends by itself; closing its lifeline first would kill it in its clean-up.
            process.join(PATIENCE_SECONDS)
            lifeline.close()
        if isinstance(answer, GemmaNeuronError):
            raise answer
        if isinstance(answer, str):
            raise CompileError(
                f"Compiling {name(job)} broke: {answer}", "This is a bug; please report it."
            )
        found: Answer = answer
        return job, found

    def _kill_all(self) -> None:
        for connection, (process, lifeline, _) in self._running.items():
            if process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(PATIENCE_SECONDS)
            connection.close()
            lifeline.close()
        self._running.clear()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    return (
        f"was ended by signal {-code} ({signal.Signals(-code).name})"
        if code < 0
        else f"exited {code}"
    )


def _serve(
    work: Callable[[Job], Answer], job: Job, answers: Connection, lifeline: Connection
) -> None:
    """A worker's whole life: one job, one answer."""
    with suppress(PermissionError):
        os.setsid()
    threading.Thread(target=_end_with_controller, args=(lifeline,), daemon=True).start()
    try:
        answers.send(work(job))
    except GemmaNeuronError as error:
        answers.send(error)
    except Exception as error:
        answers.send(f"{type(error).__name__}: {error}")
    finally:
        answers.close()


def _end_with_controller(lifeline: Connection) -> None:
    """Blocks until the controller's end closes; then nothing of this worker's group goes on."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(os.getpgrp(), signal.SIGKILL)
