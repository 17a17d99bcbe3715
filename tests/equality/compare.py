"""How far a runner's logits are from stock transformers', over everything a port does with a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.backends.base import Runner
from gemma_neuron.backends.decode import prefill_prompt, score_text

BAR = 1e-4
"""Largest difference of a logit, relative to the largest logit: float32 rounding with room."""
LENGTHS = (50, 24, 9)
"""Texts: over six windows of 8, exactly a bucket, just over the small bucket."""


def texts_of(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 3) -> list[list[int]]:
    """A text of random ordinary tokens of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocab, n).tolist() for n in lengths]


def worst(
    runner: Runner,
    texts: Sequence[Sequence[int]],
    want: Sequence[NDArray[np.float32]],
    prompts: Sequence[int],
) -> dict[str, float]:
    """Largest relative difference in prefill, decode and scoring.

    Text i is prefilled for its first `prompts[i]` tokens into slot i, then forced token by token with all slots
    at once; then scored whole over another slot's leftovers.
    """
    largest = max(float(np.abs(logits).max()) for logits in want)
    found = {"prefill": 0.0, "decode": 0.0, "score": 0.0}

    def note(phase: str, got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        found[phase] = max(found[phase], float(np.abs(got - expected).max()) / largest)

    for slot, (text, length) in enumerate(zip(texts, prompts, strict=True)):
        note("prefill", prefill_prompt(runner, text[:length], slot), want[slot][length - 1])
    _decode(runner, texts, want, prompts, note)
    for index, text in enumerate(texts):
        for start, scores in score_text(runner, text, slot=(index + 1) % runner.slots):
            note("score", scores.logits, want[index][start : start + len(scores.logits)])
    return found


def _decode(
    runner: Runner,
    texts: Sequence[Sequence[int]],
    want: Sequence[NDArray[np.float32]],
    prompts: Sequence[int],
    note: object,
) -> None:
    """Force the rest of every text, all slots in one step, each at its own position."""
    assert callable(note)
    position = list(prompts)
    while any(position[i] < len(text) for i, text in enumerate(texts)):
        active = [i < len(texts) and position[i] < len(texts[i]) for i in range(runner.slots)]
        tokens = [texts[i][position[i]] if on else 0 for i, on in enumerate(active)]
        places = [position[i] if on else 0 for i, on in enumerate(active)]
        logits = runner.decode(tokens, places, active)
        for i, on in enumerate(active):
            if on:
                note("decode", logits[i], want[i][position[i]])
                position[i] += 1
