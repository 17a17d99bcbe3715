"""The engine: one thread owns the runner and goes schedule → run → postprocess, over token ids.

Continuous batching: each step reads one prompt chunk and decodes one token for every running answer, so a
long prompt delays running streams by one chunk, not by its whole length. What a request computes depends
on the request alone: decode always runs the full batch of slots, chunk borders depend on the prompt's
length, random draws on seed, choice and place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.serving.grammar import GrammarError, Grammars
from gemma_neuron.serving.requests import (
    GenerationRequest,
    Grammar,
    Limits,
    Load,
    ReplicaState,
    TokenEvent,
)
from gemma_neuron.serving.scheduler import Deliver, Scheduler, Sequence
from gemma_neuron.serving.source import MAX_WAITING, NotServing, Phase
from gemma_neuron.serving.work import Work

if TYPE_CHECKING:
    from pathlib import Path

    from gemma_neuron.backends.base import Runner

RunnerFactory = Callable[[], "Runner"]
log = logging.getLogger(__name__)


class Engine:
    """Runs requests on a runner that its own thread makes, uses and closes. A `TokenSource`.

    `tokenizer_file` and `stop_ids` are for grammars. `after_step` is called in the engine's thread after each step.
    """

    def __init__(
        self,
        factory: RunnerFactory,
        *,
        banned_ids: Iterable[int] = (),
        tokenizer_file: Path | None = None,
        stop_ids: Iterable[int] = (),
        index: int = 0,
        reuse_prefixes: bool = True,
        after_step: Callable[[Load], None] = lambda _: None,
    ) -> None:
        self._factory = factory
        self._banned_ids = tuple(banned_ids)
        self._tokenizer_file, self._stop_ids = tokenizer_file, frozenset(stop_ids)
        self._grammars: Grammars | None = None
        self._index, self._reuse, self._after_step = index, reuse_prefixes, after_step
        self._load, self._since = Load(), time.monotonic()
        self._stepped = time.monotonic()
        self._wake = threading.Condition()
        self._new: deque[Sequence] = deque()
        self._waiting = 0
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.phase: Phase = "starting"
        self.failure: BaseException | None = None
        self.limits: Limits | None = None

    # --- called from other threads -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the runner; `phase` tells how far it is."""
        self._thread.start()

    def wait_loaded(self, seconds: float | None = None) -> bool:
        """Wait until loading ended, well or not; whether the engine is ready."""
        with self._wake:
            self._wake.wait_for(lambda: self.phase not in ("starting", "loading"), seconds)
        return self.phase == "ready"

    def submit(self, request: GenerationRequest, deliver: Deliver) -> Sequence:
        """Queue a request; `deliver` is called in the engine's thread. Raises NotServing, GrammarError."""
        constraint = None
        if request.grammar is not None:
            constraint = self._known_grammars().compile(request.grammar)
        with self._wake:
            if self.phase != "ready" or self.limits is None:
                raise NotServing(f"The server is not ready: {self.phase}.")
            if self._waiting + len(self._new) >= MAX_WAITING:
                raise NotServing(f"The queue is full: {MAX_WAITING} requests wait.")
            room = self.limits.max_context - len(request.prompt_ids)
            assert request.prompt_ids
            assert room >= min(request.max_tokens, 1), "the caller checks the prompt's length"
            sequence = Sequence(request, deliver, constraint)
            self._new.append(sequence)
            self._wake.notify_all()
        return sequence

    def check(self, grammar: Grammar) -> None:
        """Raise GrammarError when no answer could be held to it."""
        self._known_grammars().compile(grammar)

    def _known_grammars(self) -> Grammars:
        if self._grammars is None:
            raise GrammarError("This server holds no answer to a schema: it has no tokenizer file.")
        return self._grammars

    def cancel(self, sequence: Sequence) -> None:
        """Stop a request; it ends with the finish reason `cancelled` unless it ended before."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify_all()

    def waiting(self) -> int:
        """See `TokenSource.waiting`: the replica's own queue is part of its load."""
        return len(self._new)

    def states(self) -> list[ReplicaState]:
        """This process is the one replica there is."""
        phase = {"starting": "starting", "loading": "loading", "failed": "down", "stopped": "down"}
        seconds = round(time.monotonic() - self._since, 3)
        found: Any = phase.get(self.phase, "ready")
        return [
            ReplicaState(
                index=self._index, pid=os.getpid(), phase=found, seconds=seconds, load=self._load
            )
        ]

    def stuck_seconds(self) -> float:
        """How long the step under way has taken so far; 0 when idle or loading."""
        busy = self._busy and self.phase in ("ready", "draining")
        return time.monotonic() - self._stepped if busy else 0.0

    def drain(self, seconds: float) -> bool:
        """Take nothing new and wait for what runs; whether all of it ended in time."""
        with self._wake:
            if self.phase == "ready":
                self.phase = "draining"
            return self._wake.wait_for(lambda: not self._busy and not self._new, seconds)

    def close(self, seconds: float | None = None) -> None:
        """End the thread; what still runs is cancelled and the runner is closed. `seconds` bounds the
        wait for a step or a load that is under way."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    # --- the engine's thread -----------------------------------------------------------------------

    def _main(self) -> None:
        self._set_phase("loading")
        try:
            runner = self._factory()
        except BaseException as error:
            self._fail(error, [])
            return
        self._serve(runner)

    def _serve(self, runner: Runner) -> None:
        chunk = runner.prefill_buckets[-1]
        self.limits = Limits(runner.vocab, runner.slots, runner.max_context, chunk)
        if self._tokenizer_file is not None:
            self._grammars = Grammars(self._tokenizer_file, runner.vocab, self._stop_ids)
            self._grammars.prepare()
        banned = np.array([i for i in self._banned_ids if 0 <= i < runner.vocab], dtype=np.int64)
        work = Work(runner, banned, index=self._index, reuse_prefixes=self._reuse)
        self._set_phase("ready")
        try:
            while self._take(work.scheduler):
                work.step()
                self._load = work.load()
                self._after_step(self._load)
        except BaseException as error:
            self._fail(error, work.scheduler.all())
        else:
            for sequence in work.scheduler.all():
                work.finish(sequence, "cancelled")
            self._set_phase("stopped")
        finally:
            runner.close()

    def _take(self, scheduler: Scheduler) -> bool:
        """Move new requests to the scheduler, waiting for some when idle; False when closing."""
        with self._wake:
            if scheduler.idle and not self._new:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._new or self._closing)
            while self._new:
                scheduler.add(self._new.popleft())
            self._stepped = time.monotonic()
            self._busy = not scheduler.idle
            self._waiting = scheduler.waiting
            return not self._closing

    def _set_phase(self, phase: Phase) -> None:
        with self._wake:
            self.phase, self._since = phase, time.monotonic()
            self._busy = self._busy and phase == "ready"
            self._wake.notify_all()

    def _fail(self, error: BaseException, sequences: list[Sequence]) -> None:
        """Not ready from here on; everyone who waits is told."""
        self.failure = error
        if not isinstance(error, GemmaNeuronError):
            log.error("engine failed", exc_info=error)
        with self._wake:
            sequences = [*sequences, *self._new]
            self._new.clear()
            self.phase, self._busy = "failed", False
            self._wake.notify_all()
        text = f"The engine failed: {type(error).__name__}: {error}"
        for sequence in sequences:
            sequence.deliver(TokenEvent(tag=sequence.request.tag, finish="error", error=text))
