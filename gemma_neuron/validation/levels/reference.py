"""Level 2: is the reference itself a working model, before anything is compared with it?

In: the golden alone. Bars: right answers, answers that end, loops, and the loss of the sanity text over that
of its shuffled tokens. Fails here mean that checkpoint or prompt is broken, whatever the port does.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.answers import Judgement
from gemma_neuron.validation.context import LevelContext, from_problems, judge_all
from gemma_neuron.validation.degenerate import degenerate

LEVEL = 2


def run(context: LevelContext) -> LevelResult:
    """Judge the golden's own answers and losses."""
    golden = context.reference
    judged = judge_all(
        context,
        lambda name: golden.greedy[name].tokens.tolist() if name in golden.greedy else None,
    )
    loss, shuffled = golden.provenance.sanity_loss, golden.provenance.shuffled_loss
    ratio = loss / shuffled if shuffled > 0 else float("inf")
    problems = [*behaviour_problems(context, judged), *_loss_problems(context, ratio)]
    loops = sum(1 for item in judged if degenerate(_body(context, item.name)))
    bar = context.bars.reference["base_loops" if context.scope == "base" else "loops"].value
    if judged and loops / len(judged) > bar:
        problems.append(f"{loops} of {len(judged)} answers are degenerate (bar {bar:.0%})")
    detail: dict[str, Any] = {
        **shares(judged),
        "degenerate": loops,
        "sanity_loss": round(loss, 4),
        "shuffled_loss": round(shuffled, 4),
        "loss_ratio": round(ratio, 4),
        "answers": [_shown(item) for item in judged],
    }
    passed = (
        f"answers {detail['right']} of {detail['questions']} questions; "
        f"sanity loss {ratio:.2f} of shuffled"
    )
    return from_problems(LEVEL, ["the reference " + p for p in problems], passed, detail)


def behaviour_problems(context: LevelContext, judged: list[Judgement]) -> list[str]:
    """Right answers (and, in chat, ended ones) below their bars."""
    bars, counts = context.bars.reference, shares(judged)
    total = counts["questions"]
    if total == 0:
        return ["has no answers to judge"]
    problems = []
    right = bars["base_answers" if context.scope == "base" else "answers"].value
    if counts["right"] / total < right:
        wrong = next((item for item in judged if not item.right), None)
        example = f"; {wrong.name}: {wrong.text[:60]!r}" if wrong else ""
        problems.append(
            f"answers {counts['right']} of {total} questions right (bar {right:.0%}){example}"
        )
    if context.scope == "chat" and counts["ended"] / total < bars["stops"].value:
        problems.append(
            f"ends its turn in {counts['ended']} of {total} answers (bar {bars['stops'].value:.0%})"
        )
    return problems


def shares(judged: list[Judgement]) -> dict[str, int]:
    """How many were asked, right and ended."""
    return {
        "questions": len(judged),
        "right": sum(item.right for item in judged),
        "ended": sum(item.ended for item in judged),
    }


def _loss_problems(context: LevelContext, ratio: float) -> list[str]:
    bar = context.bars.reference["loss_ratio"].value
    if ratio <= bar:
        return []
    return [
        f"finds the sanity text no likelier than its shuffled tokens: ratio {ratio:.3f} (bar {bar})"
    ]


def _body(context: LevelContext, name: str) -> list[int]:
    tokens: list[int] = context.reference.greedy[name].tokens.tolist()
    return tokens[:-1] if tokens and tokens[-1] in context.assets.stop_ids else tokens


def _shown(item: Judgement) -> dict[str, Any]:
    return {
        "name": item.name,
        "kind": item.kind,
        "right": item.right,
        "ended": item.ended,
        "problems": list(item.problems),
        "text": item.text,
    }
