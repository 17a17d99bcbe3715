"""Degenerate output: repetition of any period, collapse to a few tokens. Pure, on token ids.

In: the generated ids, stop ids already taken off, and their tokenizer. Out: a reason in one line, or None. A model
that loops does so until its limit, so what counts most is how an output *ends*; ordinary text (tables, lists,
refrains) repeats and goes on. Layout, tokens without a letter or digit such as rules, indentation and box drawing, is
measured in characters: ordinary lines of it are up to 80 wide, however a vocabulary cuts them.
Thresholds: `[degenerate]` in bars.toml, with what each was measured on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.chat import Tokenizer
from gemma_neuron.validation.bars import read_bars

LONGEST_PERIOD = 200


def degenerate(ids: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """Why this output is degenerate, or None."""
    tokens = np.asarray(ids, dtype=np.int64)
    return _loop(tokens, tokenizer) or _collapse(ids, tokenizer)


def repeats_needed(period: int) -> int:
    """Tokens equal to the one `period` before, at the end, that make a loop: two more rounds of a short phrase, one of
    a long one, and never fewer than a few of one token."""
    bars = read_bars().degenerate
    least, most = int(bars["loop_least"].value), int(bars["loop_most"].value)
    return max(least, min(2 * period, most), period)


def entropy_bits(ids: Sequence[int]) -> float:
    """Shannon entropy of the ids' frequencies, in bits."""
    total = len(ids)
    if total == 0:
        return 0.0
    return -sum(n / total * math.log2(n / total) for n in Counter(ids).values())


def _loop(tokens: NDArray[np.int64], tokenizer: Tokenizer) -> str | None:
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        for start, end in _runs(tokens, period):
            if not _mere_layout(tokens, start, end, period, tokenizer):
                how = "ends in" if end == len(tokens) else "holds"
                return f"{how} a loop of period {period}: {end - start} tokens of it"
    return None


def _runs(tokens: NDArray[np.int64], period: int) -> list[tuple[int, int]]:
    """[start, end) of every stretch long enough whose tokens equal those `period` before, its first round included."""
    bars = read_bars().degenerate
    left = max(bars["left_least"].value, bars["left_rounds"].value * period)
    equal = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    starts, ends = edges[::2], edges[1::2] + period
    needed = np.where(ends == len(tokens), repeats_needed(period), left)
    long = ends - starts - period >= needed
    return list(zip(starts[long].tolist(), ends[long].tolist(), strict=True))


def _mere_layout(
    tokens: NDArray[np.int64], start: int, end: int, period: int, tokenizer: Tokenizer
) -> bool:
    """Whether a loop is layout, and no more of it than ordinary text has."""
    loop = tokens[start:end].tolist()
    # three rounds: a phrase may begin inside a character that is several byte tokens
    if not _is_layout(tokenizer.decode(loop[: 3 * period], skip_special=False)):
        return False
    bars = read_bars().degenerate
    text = tokenizer.decode(loop, skip_special=False)
    share = (end - start) / len(tokens)
    return len(text) < bars["layout_characters"].value and share < bars["layout_share"].value


def _collapse(ids: Sequence[int], tokenizer: Tokenizer) -> str | None:
    bars = read_bars().degenerate
    size = int(bars["collapse_tail"].value)
    tail = _without_runs(ids, tokenizer)[-size:]
    if len(tail) < size:
        return None
    bits = entropy_bits(tail)
    if bits >= bars["collapse_bits"].value:
        return None
    return f"collapsed: {len(set(tail))} distinct tokens, {bits:.2f} bits of entropy over the last {size} tokens"


def _without_runs(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The ids with every run of one layout token as one: an indentation is no collapse."""

    @cache
    def layout(token: int) -> bool:
        return _is_layout(tokenizer.decode([token], skip_special=False))

    return [
        token for i, token in enumerate(ids) if i == 0 or token != ids[i - 1] or not layout(token)
    ]


def _is_layout(text: str) -> bool:
    """Text without a letter or digit; no text at all is tokens nobody knows, and no layout."""
    return text != "" and not any(character.isalnum() for character in text)
