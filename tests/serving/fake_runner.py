"""A runner of a few lines of numpy: its logits depend on the slot's whole history and on nothing else.

It keeps a state per slot as a real one does, so a leak between slots, a lost chunk, a wrong position or a
row run while inactive changes what comes out; and it checks what a real graph would silently accept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.backends.base import Scores

Floats = NDArray[np.float32]


class FakeRunner:
    """`script`: tokens said in order after any prompt; without it, tokens are drawn from the history.
    `ring`: what `KeepsPrefix` says of it; `copies`: whether `save` can make one."""

    def __init__(
        self,
        *,
        vocab: int = 600,
        slots: int = 4,
        max_context: int = 256,
        buckets: tuple[int, ...] = (16, 32),
        script: Sequence[int] = (),
        step_seconds: float = 0.0,
        ring: int | None = None,
        copies: bool = True,
    ) -> None:
        self.vocab = vocab
        self.slots = slots
        self.max_context = max_context
        self.prefill_buckets = buckets
        self.score_length = 16
        self.script = list(script)
        self.step_seconds = step_seconds
        self.calls: list[tuple[str, int]] = []
        self.fail_after: int | None = None
        self.closed = False
        self._owner: int | None = None
        self._history: list[list[int]] = [[] for _ in range(slots)]
        self._prompt: list[int] = [0] * slots
        self.ring = ring
        self._copies = copies
        self._written = [0] * slots

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> Floats:
        self._begin("prefill", len(tokens))
        assert 0 < len(tokens) <= self.prefill_buckets[-1]
        return self._extend(tokens, slot, start)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> Floats:
        self._begin("decode", sum(active))
        assert len(tokens) == len(positions) == len(active) == self.slots
        out = np.full((self.slots, self.vocab), np.nan, dtype=np.float32)
        for slot in range(self.slots):
            if active[slot]:
                assert positions[slot] == len(self._history[slot])
                self._history[slot].append(tokens[slot])
                self._written[slot] = max(self._written[slot], len(self._history[slot]))
                out[slot] = self._logits(slot)
        return out

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], *, slot: int, start: int
    ) -> Scores:
        self._begin("score", len(tokens))
        assert 0 < len(tokens) == len(targets) <= self.score_length
        rows = np.stack([self._extend([t], slot, start + i) for i, t in enumerate(tokens)])
        total = np.log(np.exp(rows.astype(np.float64)).sum(axis=1)).astype(np.float32)
        wanted = rows[np.arange(len(targets)), list(targets)] - total
        return Scores(rows, total, wanted)

    def save(self, slot: int) -> int | None:
        return len(self._history[slot]) if self._copies else None

    def restore(self, slot: int, saved: int) -> None:
        self._written[slot] = saved

    def close(self) -> None:
        self.closed = True

    def _begin(self, name: str, size: int) -> None:
        assert not self.closed
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), "one thread owns the runner"
        self.calls.append((name, size))
        if self.fail_after is not None and len(self.calls) > self.fail_after:
            raise RuntimeError("device lost")
        if self.step_seconds:
            time.sleep(self.step_seconds)

    def _extend(self, tokens: Sequence[int], slot: int, start: int) -> Floats:
        if start == 0:
            self._history[slot], self._written[slot] = [], 0
        assert start <= len(self._history[slot])
        if self.ring is not None and start < self._written[slot] > self.ring:
            self._history[slot][:start] = [
                1
            ] * start  # the ring holds later positions: wrong for good
        del self._history[slot][start:]
        assert start + len(tokens) <= self.max_context
        self._history[slot].extend(tokens)
        self._prompt[slot] = len(self._history[slot])
        self._written[slot] = max(self._written[slot], len(self._history[slot]))
        return self._logits(slot)

    def _logits(self, slot: int) -> Floats:
        history = self._history[slot]
        if self.script:
            index = len(history) - self._prompt[slot]
            token = self.script[min(index, len(self.script) - 1)]
            row = np.zeros(self.vocab, dtype=np.float32)
            row[token] = 30.0
            return row
        rng = np.random.default_rng([*history, len(history)])
        row = rng.normal(size=self.vocab).astype(np.float32) * 2
        row[:107] = -20.0  # no control tokens by chance
        return row
