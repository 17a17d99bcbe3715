"""Level 2: is the reference itself a working model, before anything is compared with it?

In: the golden alone. Bars: right answers, answers that end, loops, and the loss of the sanity text over that
of its shuffled tokens. Fails here mean that checkpoint or prompt is broken, whatever the port does.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from gemma_neuron.reports import Figure, LevelResult
from gemma_neuron.validation.answers import Judgement
from gemma_neuron.validation.context import LevelContext, from_problems, judge_all, result
from gemma_neuron.validation.degenerate import degenerate

LEVEL = 2


def run(context: LevelContext) -> LevelResult:
    """Judge the golden's own answers and losses."""
    golden = context.reference
    if not context.by_name:
        none = f"{context.questions.origin} has no question for scope {context.scope}"
        return result(LEVEL, "not-run", none)
    asked = [name for name in context.by_name if context.prompt(name) is not None]
    other = [name for name in asked if not context.in_golden(name)]
    judged = judge_all(
        context,
        lambda name: (
            golden.greedy[name].tokens.tolist()
            if name in golden.greedy and name.split("/", maxsplit=1)[0] not in other
            else None
        ),
    )
    if other:
        return result(LEVEL, "not-run", _other_words(context, len(other), len(asked)))
    loss, shuffled = golden.provenance.sanity_loss, golden.provenance.shuffled_loss
    ratio = loss / max(shuffled, 1e-9)
    problems = [*behaviour_problems(context, judged), *_loss_problems(context, ratio)]
    tokenizer = context.assets.tokenizer
    loops = sum(1 for item in judged if degenerate(_body(context, item.name), tokenizer))
    bar = context.bars.reference["base_loops" if context.scope == "base" else "loops"].value
    if judged and loops / len(judged) > bar:
        problems.append(f"{loops} of {len(judged)} answers are degenerate (bar {bar:.0%})")
    detail: dict[str, Any] = {
        **shares(judged),
        "degenerate": loops,
        "sanity_loss": round(loss, 4),
        "shuffled_loss": round(shuffled, 4),
        "loss_ratio": round(ratio, 4),
        "answers": [asdict(item) for item in judged],
    }
    passed = (
        f"answers {detail['right']} of {detail['questions']} questions; "
        f"sanity loss {ratio:.2f} of shuffled"
    )
    figures = _figures(context, detail)
    return from_problems(LEVEL, ["the reference " + p for p in problems], passed, detail, figures)


def _other_words(context: LevelContext, other: int, asked: int) -> str:
    return (
        f"the golden has no answer to {other} of the {asked} questions of {context.questions.origin}: make it with "
        "the same ones (golden --prompts FILE), or leave --golden out where the checkpoint is at hand"
    )


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


def share(
    name: str,
    count: int,
    total: int,
    bar: float,
    sense: Literal["at-most", "at-least"] = "at-least",
) -> Figure:
    """`count` of `total` as a figure against its bar."""
    return Figure(name=name, value=round(count / max(total, 1), 4), bar=bar, sense=sense)


def _figures(context: LevelContext, detail: dict[str, Any]) -> list[Figure]:
    bars, total, base = context.bars.reference, detail["questions"], context.scope == "base"
    right, loops = ("base_answers", "base_loops") if base else ("answers", "loops")
    ended = [share("answers that end their turn", detail["ended"], total, bars["stops"].value)]
    return [
        share("right answers", detail["right"], total, bars[right].value),
        *([] if base else ended),
        share("degenerate answers", detail["degenerate"], total, bars[loops].value, "at-most"),
        Figure(
            name="loss of the sanity text over that of its shuffled tokens",
            value=detail["loss_ratio"],
            bar=bars["loss_ratio"].value,
        ),
    ]


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
