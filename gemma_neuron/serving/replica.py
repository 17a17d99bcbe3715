"""A replica's own process: an engine over a runner, and the messages to and from the controller.

    controller → replica   ("submit", number, request)   ("cancel", number)   ("close",)
    replica → controller   ("hello", pid)   ("loaded", limits)   ("events", [(number, event), …], load)

All events of a step go in one message, sent when the step is over: what a dying replica had not sent is made again
elsewhere. `number` names one try at a request, so that what an earlier try still says is not taken for a later one's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.elastic.engine import DEADLINE_SECONDS, WorkerContext
from gemma_neuron.elastic.faults import ReplicaDownError
from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.grammar import GrammarError
from gemma_neuron.serving.requests import Load, TokenEvent
from gemma_neuron.serving.scheduler import Sequence

if TYPE_CHECKING:
    from gemma_neuron.backends.base import Runner

POLL_SECONDS = 0.25
LOAD_SECONDS = 120.0
LEAST_STEP_SECONDS = 60.0
STUCK_STEPS, SILENT_STEPS = 20, 10
"""Times the longest step, measured while loading: a machine that is busy, or pages weights in, is slower."""
LoadRunner = Callable[[int], "Runner"]
"""Index of a replica → its runner; a module-level function or a partial of one, for it goes to another process."""


class ReplicaFailed(ReplicaDownError):
    """The replica's process lives, and its runner does not work: it raised, or a step never ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """What all replicas of a server share. `silence_seconds`: without a heartbeat, while serving, and at least
    SILENT_STEPS steps; `load_seconds`: while loading, which calls code that lets no other thread run; `step_seconds`:
    for one step of the model, None: STUCK_STEPS of the longest, at least LEAST_STEP_SECONDS."""

    load: LoadRunner
    banned_ids: tuple[int, ...] = ()
    tokenizer_file: Path | None = None
    stop_ids: frozenset[int] = frozenset()
    reuse_prefixes: bool = True
    keeps_devices: bool = False
    """See `Backend.keeps_devices`: such a process is not killed where it can be waited for."""
    silence_seconds: float = DEADLINE_SECONDS
    load_seconds: float = LOAD_SECONDS
    step_seconds: float | None = None


def serve_replica(
    context: WorkerContext, setup: ReplicaSetup, index: int, address: str, key: bytes
) -> None:
    """A replica's life, as a call of the elastic engine. Returns when told to close.

    Raises what loading raised, or ReplicaFailed.
    """
    context.phase("loading the port", setup.load_seconds)
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        connection.send(("hello", os.getpid()))
        talk = _Talk(connection)
        longest: list[float] = []

        def load() -> Runner:
            runner = setup.load(index)
            longest.append(longest_step(runner))
            return runner

        engine = Engine(
            load,
            banned_ids=setup.banned_ids,
            tokenizer_file=setup.tokenizer_file,
            stop_ids=setup.stop_ids,
            index=index,
            reuse_prefixes=setup.reuse_prefixes,
            after_step=talk.flush,
        )
        engine.start()
        if not engine.wait_loaded():
            assert engine.failure is not None
            raise engine.failure
        silence, step_seconds = patience(setup, longest[0])
        context.phase("serving", silence)
        connection.send(("loaded", engine.limits))
        try:
            while talk.take(engine):
                _check(engine, index, step_seconds)
        except (EOFError, OSError):
            pass  # the controller is gone
        engine.close(step_seconds)
        with suppress(OSError):
            talk.flush(Load())


def longest_step(runner: Runner) -> float:
    """Seconds of a step that reads a chunk of the longest bucket and decodes: run once, which also warms the graphs up.
    A slot's state begins anew with its next prompt."""
    length = min(runner.prefill_buckets[-1], runner.max_context - 1)
    slots = runner.slots
    began = time.monotonic()
    runner.prefill([0] * length, slot=0, start=0)
    runner.decode([0] * slots, [length] + [0] * (slots - 1), [True] + [False] * (slots - 1))
    return time.monotonic() - began


def patience(setup: ReplicaSetup, longest: float) -> tuple[float, float]:
    """Seconds of silence after which a replica counts as hung, and of a step after which it counts as stuck. The cpu
    back end's graphs keep Python's lock while they run, so that no heartbeat is sent within one."""
    stuck = setup.step_seconds
    if stuck is None:
        stuck = max(LEAST_STEP_SECONDS, STUCK_STEPS * longest)
    return max(setup.silence_seconds, min(stuck, SILENT_STEPS * longest)), stuck


def _check(engine: Engine, index: int, step_seconds: float) -> None:
    """Raise ReplicaFailed when the engine failed, or when a step takes far too long."""
    if engine.phase == "failed":
        text = f"{type(engine.failure).__name__}: {engine.failure}"
        raise ReplicaFailed(f"Replica {index} failed: {text}", rank=index, pid=os.getpid())
    stuck = engine.stuck_seconds()
    if stuck > step_seconds:
        raise ReplicaFailed(
            f"Replica {index} has been in one step for {stuck:.0f} s (at most {step_seconds:g} s).",
            rank=index,
            pid=os.getpid(),
        )


class _Talk:
    """The replica's end of the connection. Events are gathered in the engine's thread and sent by it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._events: list[tuple[int, TokenEvent]] = []
        self._sequences: dict[int, Sequence] = {}
        self._lock = threading.Lock()
        """Both threads send, and what one has begun to send must not be broken into."""

    def take(self, engine: Engine) -> bool:
        """Do what the controller asks next, if anything within the poll time; False when it asked to close."""
        if not self._connection.poll(POLL_SECONDS):
            return True
        kind, *rest = self._connection.recv()
        if kind == "submit":
            self._submit(engine, *rest)
        elif kind == "cancel":
            sequence = self._sequences.get(rest[0])
            if sequence is not None:
                engine.cancel(sequence)
        return bool(kind != "close")

    def _submit(self, engine: Engine, number: int, request: Any) -> None:
        ended = threading.Event()

        def deliver(event: TokenEvent) -> None:
            self._events.append((number, event))
            if event.finish is not None:
                ended.set()
                self._sequences.pop(number, None)

        try:
            self._sequences[number] = engine.submit(request, deliver)
        except GrammarError as error:
            event = TokenEvent(tag=request.tag, finish="error", error=str(error))
            self._send(("events", [(number, event)], Load()))
            return
        if ended.is_set():  # the engine's thread may have been done before it was known here
            self._sequences.pop(number, None)

    def flush(self, load: Load) -> None:
        """Send what the step brought. Called by the engine's thread, and at the end when that is over."""
        events, self._events = self._events, []
        self._send(("events", events, load))

    def _send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)
