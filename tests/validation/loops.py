"""Loops for the degenerate-output detector to find: made ones of every period, and ones a real model fell into.

The real ones: greedy decoding of Gemma 3 270M by stock transformers, float32, in tests/data/greedy-270m.jsonl: a line
a prompt with the generated ids. `scripts/check-degenerate --generate DIR` makes the file anew, from the prompts of
greedy-270m-prompts.txt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.tokenizer import Tokenizer
from gemma_neuron.validation.degenerate import LONGEST_PERIOD, repeats_needed

DATA = Path(__file__).parents[1] / "data"
REAL, PROMPTS = DATA / "greedy-270m.jsonl", DATA / "greedy-270m-prompts.txt"
PREFIXES = (0, 20, 100, 400)
"""Good tokens before a made loop."""
STEP = 8
"""A real loop is judged every so many tokens from where it is long enough."""


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


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy continuation. `cycle`: (period, first token of it) when it ends in exact repetition."""

    prompt: str
    ids: tuple[int, ...]
    cycle: tuple[int, int] | None


def real_generations(path: Path = REAL) -> list[Generation]:
    """Every continuation of the file, in its order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Generation(line["prompt"], tuple(line["ids"]), cycle_of(line["ids"])) for line in lines]


def cycle_of(ids: Sequence[int]) -> tuple[int, int] | None:
    """(period, start) of the exact repetition a text ends in: three rounds of it, and a quarter of the text."""
    for period in range(1, LONGEST_PERIOD + 1):
        same = 0
        while same < len(ids) - period and ids[-1 - same] == ids[-1 - same - period]:
            same += 1
        if same >= max(2 * period, len(ids) // 4):
            return period, len(ids) - same - period
    return None


def real_loops(generations: Sequence[Generation]) -> Iterator[Loop]:
    """Each looping continuation cut every STEP tokens from where three rounds, or a round and 64 tokens, are there."""
    for number, item in enumerate(generations):
        if item.cycle is None:
            continue
        period, start = item.cycle
        first = start + period + repeats_needed(period)
        for end in range(first, len(item.ids) + 1, STEP):
            yield Loop(f"real {number} {end}", period, item.ids[:end])
