"""From logits to a token, on the host, in numpy.

Random numbers are counter-based: Philox keyed by seed and choice, with the token's place in the answer as
the counter. No state is carried, so what else runs in the batch cannot change a draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.serving.requests import Sampling, TokenLogprob

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Allowed = NDArray[np.bool_]
SHORTLIST = 2048
"""Sorting a vocabulary of 262,144 takes some 20 ms; nearly always the top 2,048 hold the wanted mass."""
BLOCK = 128


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    *,
    place: int,
    prompt: Sequence[int] = (),
    counts: Mapping[int, int] | None = None,
    banned: Ints | None = None,
    allowed: Allowed | None = None,
) -> int:
    """The token at `place` (0 is the first) of an answer whose tokens so far are in `counts`."""
    values = _adjusted(logits, sampling, prompt, counts or {}, banned)
    if allowed is not None:
        values[~allowed] = -np.inf
    if sampling.temperature == 0.0:
        return int(values.argmax())
    top = _top(values, sampling.top_k)
    scaled = values[top].astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    kept = top[_kept(scaled, sampling)]
    scaled = (values[kept].astype(np.float64) - float(values.max())) / sampling.temperature
    cumulative = np.cumsum(np.exp(scaled))
    drawn = uniform(sampling.seed, sampling.choice, place) * cumulative[-1]
    index = min(int(np.searchsorted(cumulative, drawn, side="right")), len(kept) - 1)
    return int(kept[index])


def uniform(seed: int, choice: int, place: int) -> float:
    """A number in [0, 1) that depends on these three alone."""
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=place)).random())


def token_logprob(logits: NDArray[np.float32], token: int, alternatives: int) -> TokenLogprob:
    """The token's log-probability and the best `alternatives`, most probable first."""
    values = logits.astype(np.float64)
    peak = values.max()
    total = peak + np.log(np.exp(values - peak).sum())
    top: tuple[tuple[int, float], ...] = ()
    if alternatives > 0:
        best = np.argpartition(-values, min(alternatives, len(values)) - 1)[:alternatives]
        ranked = sorted(best.tolist(), key=lambda i: (-values[i], i))
        top = tuple((i, float(values[i] - total)) for i in ranked)
    return TokenLogprob(token, float(values[token] - total), top)


def scored_logprob(
    logits: NDArray[np.float32], token: int, logprob: float, logsumexp: float, alternatives: int
) -> TokenLogprob:
    """As `token_logprob` where the scoring graph gave the sum: only alternatives look at the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    if alternatives > 0:
        count = min(alternatives, len(logits))
        best = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
        ranked = sorted(best.tolist(), key=lambda i: (-logits[i], i))
        top = tuple((i, float(logits[i]) - logsumexp) for i in ranked)
    return TokenLogprob(token, logprob, top)


def _adjusted(
    logits: NDArray[np.float32],
    sampling: Sampling,
    prompt: Sequence[int],
    counts: Mapping[int, int],
    banned: Ints | None,
) -> NDArray[np.float32]:
    """Logits after bans, bias and penalties, as a copy when any applies."""
    values = logits.copy()
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *counts], dtype=np.int64))
        old = values[seen]
        penalty = np.float32(sampling.repetition_penalty)
        values[seen] = np.where(old > 0, old / penalty, old * penalty)
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = np.fromiter(counts.keys(), dtype=np.int64)
        times = np.fromiter(counts.values(), dtype=np.float32)
        values[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if banned is not None and len(banned):
        values[banned] = -np.inf
    return values


def _top(values: NDArray[np.float32], top_k: int) -> Ints:
    """Ids of the `top_k` largest values, ties at the border included; all for 0.

    The k-th largest of the blocks' maxima is no larger than the k-th largest value: what lies below it need not be
    looked at, which leaves hundreds of 262,144 to sort.
    """
    if not 0 < top_k < len(values):
        return np.arange(len(values))
    blocks = len(values) // BLOCK
    ids: Ints
    if top_k < blocks:
        peaks = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        ids = np.flatnonzero(values >= np.partition(peaks, -top_k)[-top_k])
    else:
        ids = np.arange(len(values))
    near = values[ids]
    found: Ints = ids[near >= np.partition(near, -top_k)[-top_k]]
    return found


def _kept(scaled: Floats, sampling: Sampling) -> Ints:
    """Indices that may be drawn of what top_k left: top_p, then min_p."""
    kept: Ints = np.arange(len(scaled))
    if sampling.top_p < 1.0:
        kept = _nucleus(scaled, kept, sampling.top_p)
    if sampling.min_p > 0.0:
        values = scaled[kept]
        kept = kept[values >= values.max() + np.log(sampling.min_p)]
    return kept


def _nucleus(scaled: Floats, kept: Ints, top_p: float) -> Ints:
    """The fewest most probable ids that hold `top_p` of the mass; at least one."""
    values = scaled[kept]
    total = np.exp(values).sum()
    if len(kept) > 2 * SHORTLIST:
        short = np.argpartition(-values, SHORTLIST)[:SHORTLIST]
        if np.exp(values[short]).sum() >= top_p * total:
            kept, values = kept[short], values[short]
    order = np.lexsort((kept, -values))
    mass = np.cumsum(np.exp(values[order]))
    count = int(np.searchsorted(mass, top_p * total, side="left")) + 1
    return np.sort(kept[order[:count]])
