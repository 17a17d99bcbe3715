"""Level 6: does the port hold a conversation? Judged on its own text, not against the reference.

In: the port's answers of level 5 (made here when that level was left out). Bars: right answers, answers that
end by a stop id, and no leaked control token, loop or unparsable JSON beyond what the bars allow. Not
applicable to a model without a chat template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gemma_neuron.backends.decode import greedy
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.answers import Judgement
from gemma_neuron.validation.context import (
    LevelContext,
    follow_up,
    from_problems,
    judge_all,
    result,
)
from gemma_neuron.validation.levels.reference import share, shares
from gemma_neuron.validation.prompts import GreedyPrompt

LEVEL = 6


def run(context: LevelContext) -> LevelResult:
    """Ask every question of the set that the template can render."""
    if context.assets.template is None and context.forced is None:
        return result(LEVEL, "not-applicable", "the model has no chat template")
    if context.scope == "base":
        return result(LEVEL, "not-run", "left out by --base, though the model has a chat template")
    judged = judge_all(context, lambda name: _answer(context, name))
    if not judged:
        return result(LEVEL, "not-run", "no question fits the template and the port's context")
    counts, bars = shares(judged), context.bars
    problems = []
    if counts["right"] / len(judged) < bars.chat["answers"].value:
        problems.append(_wrong_words(judged, counts["right"], bars.chat["answers"].value))
    if counts["ended"] / len(judged) < bars.reference["stops"].value:
        problems.append(
            f"{counts['ended']} of {len(judged)} answers end by a stop id "
            f"(bar {bars.reference['stops'].value:.0%})"
        )
    spoilt = [item for item in judged if item.problems]
    if len(spoilt) / len(judged) > 1 - bars.chat["answers"].value:
        problems.append(
            f"{len(spoilt)} of {len(judged)} answers spoilt; {spoilt[0].name} {spoilt[0].problems[0]}"
        )
    leaks = [item for item in judged if any("control tokens" in p for p in item.problems)]
    if leaks and len(spoilt) / len(judged) <= 1 - bars.chat["answers"].value:
        problems.append(f"{leaks[0].name}: {leaks[0].problems[0]}")
    detail: dict[str, Any] = {
        **counts,
        "kinds": {
            kind: f"{sum(i.right for i in judged if i.kind == kind)} of {n}"
            for kind, n in sorted(Counter(item.kind for item in judged).items())
        },
        "answers": [asdict(item) for item in judged],
    }
    passed = f"{counts['right']} of {len(judged)} answers right, {counts['ended']} end their turn"
    figures = [
        share("right answers", counts["right"], len(judged), bars.chat["answers"].value),
        share(
            "answers that end their turn",
            counts["ended"],
            len(judged),
            bars.reference["stops"].value,
        ),
    ]
    return from_problems(LEVEL, problems, passed, detail, figures)


def _answer(context: LevelContext, name: str) -> Sequence[int] | None:
    """The port's answer to a prompt by name, generated when level 5 did not; None when there is none."""
    first = name.split("/", maxsplit=1)[0]
    prompt = context.prompt(first)
    if prompt is None:
        return None
    if first != name:
        prompt = follow_up(context.talk, context.by_name, prompt, context.answers.get(first, []))
        if prompt is None or len(prompt.ids) + prompt.limit > context.runner.max_context:
            return None
    return _generated(context, prompt)


def _generated(context: LevelContext, prompt: GreedyPrompt) -> list[int]:
    golden = context.reference.greedy.get(prompt.name) if context.golden else None
    same = golden is None or golden.prompt.tolist() == list(prompt.ids)
    if prompt.name not in context.answers or not same:
        context.answers[prompt.name] = greedy(
            context.runner, prompt.ids, prompt.limit, prompt.stop_ids
        )
    return context.answers[prompt.name]


def _wrong_words(judged: list[Judgement], right: int, bar: float) -> str:
    wrong = next(item for item in judged if not item.right)
    return (
        f"{right} of {len(judged)} answers right (bar {bar:.0%}); {wrong.name} ({wrong.kind}): "
        f"{wrong.text[:80]!r}"
    )
