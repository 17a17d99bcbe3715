"""Degenerate output: repetition of any period, collapse to a few tokens. Pure, on token ids.

In: the generated ids, stop ids already taken off. Out: a reason in one line, or None. What counts as a
loop is how it *ends*: a model that loops does so until its limit, while ordinary text (tables, lists,
refrains) repeats and goes on. A long exact repetition anywhere counts too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 200
TAIL = 64
"""Tokens at the end that the collapse test looks at."""
FEW_TOKENS = 4
"""So few distinct tokens among the last TAIL is a collapse."""
LEAST_ENTROPY_BITS = 2.0
"""Of the last TAIL tokens; four tokens in equal parts have exactly this."""


def degenerate(ids: Sequence[int]) -> str | None:
    """Why this output is degenerate, or None."""
    tokens = np.asarray(ids, dtype=np.int64)
    return _loop(tokens) or _collapse(tokens)


def repeats_needed(period: int) -> int:
    """Tokens equal to the one `period` before, at the end, that make a loop.

    16 equal tokens, or two whole repeats of a phrase of up to 32, or one of at least 64 verbatim.
    """
    return max(15, min(2 * period, 64), period)


def entropy_bits(ids: Sequence[int]) -> float:
    """Shannon entropy of the ids' frequencies, in bits."""
    total = len(ids)
    if total == 0:
        return 0.0
    return -sum(n / total * math.log2(n / total) for n in Counter(ids).values())


def _loop(tokens: NDArray[np.int64]) -> str | None:
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        equal = tokens[period:] == tokens[:-period]
        needed = repeats_needed(period)
        if len(equal) < needed:
            continue
        breaks = np.flatnonzero(~equal)
        tail = len(equal) - (int(breaks[-1]) + 1 if len(breaks) else 0)
        if tail >= needed:
            return f"ends in a loop of period {period}: {tail + period} tokens of it"
        edges = np.concatenate(([-1], breaks, [len(equal)]))
        longest = int(np.diff(edges).max()) - 1
        if longest >= max(64, 4 * period):
            return f"holds a loop of period {period}: {longest + period} tokens of it"
    return None


def _collapse(tokens: NDArray[np.int64]) -> str | None:
    if len(tokens) < TAIL:
        return None
    tail = [int(token) for token in tokens[-TAIL:]]
    distinct = len(set(tail))
    if distinct <= FEW_TOKENS:
        return f"collapsed: {distinct} distinct tokens among the last {TAIL}"
    bits = entropy_bits(tail)
    if bits < LEAST_ENTROPY_BITS:
        return f"collapsed: {bits:.2f} bits of entropy over the last {TAIL} tokens"
    return None
