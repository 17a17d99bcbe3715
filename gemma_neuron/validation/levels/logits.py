"""Level 3: teacher-forced logits of the port against the golden, at every position of every text.

In: the golden's texts, the port's scoring graph. Bars: `Tolerance` of the port's dtype: distance relative to
the largest logit, KL, Pearson, and flips of the likeliest token that noise does not explain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.backends.decode import score_text
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.compare import Distances, distances
from gemma_neuron.validation.context import LevelContext, from_problems, result
from gemma_neuron.validation.golden_tensors import GoldenText
from gemma_neuron.validation.tolerance import by_position, summary

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 3


def run(context: LevelContext) -> LevelResult:
    """Score each text and compare."""
    texts = [
        t for t in context.reference.texts.values() if len(t.ids) <= context.runner.max_context
    ]
    if not texts:
        return result(
            LEVEL, "not-run", "the port's context is shorter than every text of the golden"
        )
    problems: list[str] = []
    figures: dict[str, dict[str, Any]] = {}
    positions: dict[str, dict[str, Any]] = {}
    for text in texts:
        found, scores_off = _compare(context, text)
        figures[text.name] = {**summary(found, text.largest), "recorded": _recorded(text)}
        positions[text.name] = by_position(found, text.largest)
        problem = context.tolerance.problem(found, text.largest) or scores_off
        if problem is not None:
            problems.append(f"{text.name}: {problem}")
    worst = max(item["max_relative"] for item in figures.values())
    count = sum(item["positions"] for item in figures.values())
    detail: dict[str, Any] = {
        "tolerance": context.tolerance.to_json(),
        "texts": figures,
        "by_position": positions,
    }
    passed = (
        f"{count} positions of {len(texts)} texts, at most {worst:.2g} of the largest logit off"
    )
    judged = context.tolerance.figures(figures.values())
    return from_problems(LEVEL, problems, passed, detail, judged)


def _compare(context: LevelContext, text: GoldenText) -> tuple[Distances, str | None]:
    """(distances at every position, what is wrong with the graph's own log-probabilities)."""
    ids = [int(token) for token in text.ids]
    parts, off = [], 0.0
    for start, scores in score_text(context.runner, ids):
        parts.append(distances(text, start, scores.logits))
        rows = slice(start, start + len(scores.logsumexp))
        off = max(off, _largest(scores.logsumexp - text.logsumexp[rows]))
        last = rows.stop == len(ids)  # the last token has no target
        theirs = scores.target_logprob[: -1 if last else None]
        ours = text.target_logprob[rows][: -1 if last else None]
        if len(ours):
            off = max(off, _largest(theirs - ours))
    allowed = 2 * context.tolerance.relative * text.largest
    if off > allowed:
        return Distances.join(parts), (
            f"log-sum-exp or target log-probability is {off:.3g} off (bar {allowed:.3g})"
        )
    return Distances.join(parts), None


def _largest(difference: NDArray[np.float32]) -> float:
    """By magnitude; what is no number is larger than any."""
    return float(np.nan_to_num(np.abs(difference), nan=1e30, posinf=1e30).max())


def _recorded(text: GoldenText) -> str:
    return "all logits" if text.top_ids is None else f"the likeliest {text.top_ids.shape[1]}"
