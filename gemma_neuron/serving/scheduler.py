"""Who runs next: the queue, the decode slots, the prompt chunks. Touches no tensor.

A sequence waits, gets a slot (which is room for a whole context), reads its prompt chunk by chunk, then
decodes until it finishes. Chunk borders come from the prompt's length alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gemma_neuron.backends.decode import chunk_spans
from gemma_neuron.serving.requests import GenerationRequest, TokenEvent, TokenLogprob

Deliver = Callable[[TokenEvent], None]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way: its slot, the chunks still to read, the tokens made so far."""

    request: GenerationRequest
    deliver: Deliver
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

    def append(self, token: int) -> None:
        self.made.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


class Scheduler:
    """Queue and slots of one runner."""

    def __init__(self, *, slots: int, prefill_length: int, score_length: int) -> None:
        self._free = list(range(slots))
        self._prefill_length = prefill_length
        self._score_length = score_length
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission."""

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
        """Give free slots, lowest first, to those who wait longest."""
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop(0)
            length = (
                self._score_length if sequence.request.prompt_logprobs else self._prefill_length
            )
            sequence.chunks.extend(chunk_spans(len(sequence.request.prompt_ids), length))
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
            self._free.append(sequence.slot)
            self._free.sort()

    def all(self) -> list[Sequence]:
        return [*self._running, *self._waiting]
