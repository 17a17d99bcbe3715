"""Who runs next: the queue, the decode slots, the prompt chunks. Touches no tensor.

A sequence waits, gets a slot (which is KV room for a whole context), reads its prompt chunk by chunk, then
decodes until it finishes. Chunk borders come from the prompt's length alone, whatever the slot held of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gemma_neuron.backends.decode import chunk_spans
from gemma_neuron.serving.requests import GenerationRequest, TokenEvent, TokenLogprob
from gemma_neuron.serving.sampling import Allowed
from gemma_neuron.serving.slots import Slots

Deliver = Callable[[TokenEvent], None]


class Constraint(Protocol):
    """What an answer may go on with: a grammar and where the answer stands in it."""

    def allowed(self) -> Allowed | None:
        """Ids that may come next, [vocab] bool; None for all. Raises GrammarError past its limits."""

    def accept(self, token: int) -> None:
        """The token came. Raises GrammarError for one that was not allowed."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way: its slot, the chunks still to read, the tokens made so far."""

    request: GenerationRequest
    deliver: Deliver
    constraint: Constraint | None = None
    slot: int = -1
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    made: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    cancelled: bool = False

    @property
    def position(self) -> int:
        """Where the newest token goes: it has been chosen and not yet been fed."""
        return len(self.request.prompt_ids) + len(self.made) - 1

    @property
    def replaying(self) -> int | None:
        """The next token, where it was made before."""
        replay = self.request.replay
        return replay[len(self.made)] if len(self.made) < len(replay) else None

    def append(self, token: int) -> None:
        self.made.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


class Scheduler:
    """Queue and slots of one runner."""

    def __init__(self, slots: Slots, *, prefill_length: int, score_length: int) -> None:
        self.slots = slots
        self._prefill_length = prefill_length
        self._score_length = score_length
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission."""
        self.prefix_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> None:
        """Give free slots to those who wait longest."""
        while self._waiting:
            request = self._waiting[0].request
            taken = self.slots.take(request.prompt_ids, fresh=request.prompt_logprobs)
            if taken is None:
                return
            sequence = self._waiting.popleft()
            sequence.slot, held = taken[0].index, taken[1]
            length = self._score_length if request.prompt_logprobs else self._prefill_length
            spans = chunk_spans(len(request.prompt_ids), length)
            sequence.chunks.extend(span for span in spans if span[0] >= held)
            self.prefix_tokens += held
            self._running.append(sequence)

    def reading(self) -> Sequence | None:
        """The sequence whose prompt is read next: the one admitted first of those not done."""
        return next((s for s in self._running if s.chunks), None)

    def decoding(self) -> list[Sequence]:
        """Sequences with their prompt read: one row each of the next decode step."""
        return [s for s in self._running if not s.chunks]

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its slot is free again."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self.slots.give_back(sequence.slot)

    def all(self) -> list[Sequence]:
        return [*self._running, *self._waiting]
