"""Made loops for the degenerate-output detector to find: of every period, after good text of several lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemma_neuron.tokenizer import Tokenizer
from gemma_neuron.validation.degenerate import repeats_needed

PREFIXES = (0, 20, 100, 400)
"""Good tokens before a made loop."""


@dataclass(frozen=True, slots=True)
class Loop:
    name: str
    period: int
    ids: tuple[int, ...]


def made_loops(tokenizer: Tokenizer, good: Sequence[int], periods: Sequence[int]) -> Iterator[Loop]:
    """Loops of random tokens after a stretch of `good` ones: as short as counts, one round more, many rounds."""
    for period in periods:
        rng = random.Random(period)
        for prefix in PREFIXES:
            phrase = _phrase(tokenizer, period, rng)
            shortest = period + repeats_needed(period)
            for length in (shortest, shortest + period, max(600, 4 * period)):
                loop = (phrase * (length // period + 1))[:length]
                start = rng.randrange(max(1, len(good) - prefix))
                ids = (*good[start : start + prefix], *loop)
                yield Loop(f"made {period} {prefix} {length}", period, ids)


def _phrase(tokenizer: Tokenizer, period: int, rng: random.Random) -> list[int]:
    """Random ids with a letter or digit among them, and no loop of a shorter period."""
    while True:
        phrase = [rng.randrange(tokenizer.vocab_size) for _ in range(period)]
        text = tokenizer.decode(phrase * 2, skip_special=False)
        if any(c.isalnum() for c in text) and len(set(phrase)) > period // 2:
            return phrase


def layout_loops(tokenizer: Tokenizer, good: Sequence[int]) -> Iterator[Loop]:
    """One mark for ever: nothing but it, and three lines of it after good text."""
    for mark in "!-=_.* ":
        token = tokenizer.id_of(mark)
        if token is not None:
            yield Loop(f"layout {mark!r} alone", 1, (token,) * 48)
            yield Loop(f"layout {mark!r} after text", 1, (*good[:100], *[token] * 240))
