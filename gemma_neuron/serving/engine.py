"""The engine: one thread owns the runner and goes schedule → run → postprocess, over token ids.

Continuous batching: each step reads one prompt chunk and decodes one token for every running answer, so a
long prompt delays running streams by one chunk, not by its whole length. What a request computes depends
on the request alone: decode always runs the full batch of slots, chunk borders depend on the prompt's
length, random draws on seed, choice and place.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.serving.requests import FinishReason, GenerationRequest, TokenEvent, TokenLogprob
from gemma_neuron.serving.sampling import Ints, choose, token_logprob
from gemma_neuron.serving.scheduler import Deliver, Scheduler, Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gemma_neuron.backends.base import Runner

Phase = Literal["starting", "loading", "ready", "draining", "failed", "stopped"]
RunnerFactory = Callable[[], "Runner"]
MAX_WAITING = 1024
log = logging.getLogger(__name__)


class NotServing(Exception):
    """The engine takes no request now; the text says why, for people."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded runner can do."""

    vocab: int
    slots: int
    max_context: int


class Engine:
    """Runs requests on a runner that its own thread makes, uses and closes."""

    def __init__(self, factory: RunnerFactory, *, banned_ids: Iterable[int] = ()) -> None:
        self._factory = factory
        self._banned_ids = tuple(banned_ids)
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
        """Queue a request; `deliver` is called in the engine's thread. Raises NotServing."""
        with self._wake:
            if self.phase != "ready" or self.limits is None:
                raise NotServing(f"The server is not ready: {self.phase}.")
            if self._waiting + len(self._new) >= MAX_WAITING:
                raise NotServing(f"The queue is full: {MAX_WAITING} requests wait.")
            room = self.limits.max_context - len(request.prompt_ids)
            assert request.prompt_ids
            assert room >= min(request.max_tokens, 1), "the caller checks the prompt's length"
            sequence = Sequence(request, deliver)
            self._new.append(sequence)
            self._wake.notify_all()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop a request; it ends with the finish reason `cancelled` unless it ended before."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify_all()

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
        self.limits = Limits(runner.vocab, runner.slots, runner.max_context)
        banned = np.array([i for i in self._banned_ids if 0 <= i < runner.vocab], dtype=np.int64)
        work = _Work(runner, banned)
        self._set_phase("ready")
        try:
            while self._take(work.scheduler):
                work.step()
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
            self._busy = not scheduler.idle
            self._waiting = scheduler.waiting
            return not self._closing

    def _set_phase(self, phase: Phase) -> None:
        with self._wake:
            self.phase = phase
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


class _Work:
    """One step of the engine: schedule, run, postprocess."""

    def __init__(self, runner: Runner, banned: Ints) -> None:
        self._runner = runner
        self._banned = banned
        self.scheduler = Scheduler(
            slots=runner.slots,
            prefill_length=runner.prefill_buckets[-1],
            score_length=runner.score_length,
        )

    def step(self) -> None:
        for sequence in self.scheduler.all():
            if sequence.cancelled:
                self.finish(sequence, "cancelled")
        self.scheduler.admit()
        decoding = self.scheduler.decoding()
        reading = self.scheduler.reading()
        if reading is not None:
            self._read_chunk(reading)
        if decoding:
            self._decode(decoding)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        self.scheduler.release(sequence)
        sequence.deliver(TokenEvent(tag=sequence.request.tag, finish=reason, error=error))

    def _read_chunk(self, sequence: Sequence) -> None:
        request = sequence.request
        start, end = sequence.chunks.popleft()
        tokens = request.prompt_ids[start:end]
        if request.prompt_logprobs:
            logits = self._score_chunk(sequence, start, end)
        else:
            logits = self._runner.prefill(tokens, slot=sequence.slot, start=start)
        if sequence.chunks:
            return
        if request.prompt_logprobs:
            scores = tuple(sequence.prompt_scores)
            sequence.deliver(TokenEvent(tag=request.tag, prompt=scores))
        if request.max_tokens == 0:
            self.finish(sequence, "length")
        else:
            self._postprocess(sequence, logits)

    def _score_chunk(self, sequence: Sequence, start: int, end: int) -> NDArray[np.float32]:
        """As a prefill chunk, and the log-probability of each token that follows in the prompt."""
        ids = sequence.request.prompt_ids
        targets = [*ids[start + 1 : end + 1]]
        targets += [ids[-1]] * (end - start - len(targets))
        scores = self._runner.score(ids[start:end], targets, slot=sequence.slot, start=start)
        if start == 0:
            sequence.prompt_scores.append(TokenLogprob(ids[0], None))
        wanted = sequence.request.logprobs or 0
        for row in range(min(end, len(ids) - 1) - start):
            found = token_logprob(scores.logits[row], targets[row], wanted)
            sequence.prompt_scores.append(found)
        last: NDArray[np.float32] = scores.logits[end - start - 1]
        return last

    def _decode(self, sequences: list[Sequence]) -> None:
        slots = self._runner.slots
        tokens, positions, active = [0] * slots, [0] * slots, [False] * slots
        for sequence in sequences:
            tokens[sequence.slot] = sequence.made[-1]
            positions[sequence.slot] = sequence.position
            active[sequence.slot] = True
        logits = self._runner.decode(tokens, positions, active)
        for sequence in sequences:
            self._postprocess(sequence, logits[sequence.slot])

    def _postprocess(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Choose a token, tell it, and end the request when it is the last."""
        request = sequence.request
        if not np.isfinite(logits[int(logits.argmax())]):  # argmax stops at the first NaN
            self.finish(sequence, "error", "The model computed logits that are not finite.")
            return
        token = choose(
            logits,
            request.sampling,
            place=len(sequence.made),
            prompt=request.prompt_ids,
            counts=sequence.counts,
            banned=self._banned,
        )
        sequence.append(token)
        told = None
        if request.logprobs is not None:
            told = token_logprob(logits, token, request.logprobs)
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self.scheduler.release(sequence)
        sequence.deliver(TokenEvent(tag=request.tag, token=token, logprob=told, finish=reason))

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.stop_ids:
            return "stop"
        total = len(request.prompt_ids) + len(sequence.made)
        if len(sequence.made) >= request.max_tokens or total >= self._runner.max_context:
            return "length"
        return None
