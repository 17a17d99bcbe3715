"""Level 5: greedy tokens of port and reference, with the reference's margin where they part.

In: the golden's continuations, as many at once as the port has slots. Bars: a divergence whose margin lies under the
noise of the port's dtype is noted, not failed; a port that degenerates where the reference does not fails. A base model
loops by nature: after a divergence within the noise, its loop and the reference's lack of one are two samples of the
same thing, so those are noted, and fail together when a reference with as many would (level 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gemma_neuron.backends.decode import Asked, greedy_together
from gemma_neuron.reports import Figure, LevelResult
from gemma_neuron.validation.context import LevelContext, from_problems, judge_all, result
from gemma_neuron.validation.degenerate import degenerate
from gemma_neuron.validation.golden_tensors import GoldenGreedy
from gemma_neuron.validation.levels.reference import share

LEVEL = 5
BEFORE = 16
"""Tokens before a divergence that a report shows."""


def run(context: LevelContext) -> LevelResult:
    """Generate every continuation, keep the tokens for level 6, compare."""
    runner, loops, partings = context.runner, _Loops(context), []
    compared = equal = 0
    items = [
        item
        for item in context.reference.greedy.values()
        if len(item.prompt) + len(item.tokens) <= runner.max_context
    ]
    if not items:
        held = context.reference.greedy
        reason = "the port's context is shorter than every prompt of the golden"
        return result(LEVEL, "not-run", reason if held else "the golden holds no continuation")
    outputs = greedy_together(runner, [_asked(context, item) for item in items])
    for item, tokens in zip(items, outputs, strict=True):
        context.answers[item.name] = tokens
        same = _equal_run(item.tokens.tolist(), tokens)
        parted = same < min(len(item.tokens), len(tokens))
        compared, equal = compared + same + parted, equal + same
        if parted:
            partings.append(_parting(context, item, tokens, same))
        loops.look(item, tokens, after_noise=parted and partings[-1]["noise"])
    real = [p for p in partings if not p["noise"]]
    problems = [_parting_words(p) for p in real] + loops.problems()
    context.facts["token_match"] = {"compared": compared, "equal": equal}
    context.facts["first_divergence"] = _contract((real or partings)[0] if partings else None)
    detail: dict[str, Any] = {
        "generations": len(items),
        "longest": max(len(tokens) for tokens in context.answers.values()),
        "margin_bar": context.tolerance.margin,
        "divergences": partings,
        "degenerate_after_noise": loops.natural,
    }
    if context.scope == "base":  # with a template level 6 judges them
        judged = judge_all(context, context.answers.get)
        detail["answers"] = [asdict(item) for item in judged]
    noted = f"; {len(partings)} part within the noise" if partings else ""
    noted += f", {len(loops.natural)} of these loop" if loops.natural else ""
    passed = f"{equal} of {compared} greedy tokens equal over {len(items)} prompts{noted}"
    lead = max((p["margin"] for p in partings), default=0.0)
    figures = [
        Figure(name="lead overturned, logits", value=lead, bar=context.tolerance.margin),
        *loops.figures(),
    ]
    return from_problems(LEVEL, problems, passed, detail, figures)


def _asked(context: LevelContext, item: GoldenGreedy) -> Asked:
    prompt = context.prompt(item.name)
    known = prompt is not None and list(prompt.ids) == item.prompt.tolist()
    limit = prompt.limit if prompt is not None and known else len(item.tokens)
    room = context.runner.max_context - len(item.prompt)
    stops = () if prompt is not None and not prompt.stop_ids else context.assets.stop_ids
    return Asked(ids=item.prompt.tolist(), limit=min(limit, room), stop_ids=stops)


def _equal_run(a: list[int], b: list[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def _parting(
    context: LevelContext, item: GoldenGreedy, tokens: list[int], step: int
) -> dict[str, Any]:
    margin = item.margin(step, tokens[step])
    context_ids = [*item.prompt.tolist(), *tokens[:step]]
    return {
        "prompt": item.name,
        "position": len(item.prompt) + step,
        "step": step,
        "port_token": tokens[step],
        "reference_token": int(item.tokens[step]),
        "before": context.assets.tokenizer.decode(context_ids[-BEFORE:], skip_special=False),
        "port_text": context.assets.tokenizer.decode([tokens[step]], skip_special=False),
        "reference_text": context.assets.tokenizer.decode(
            [int(item.tokens[step])], skip_special=False
        ),
        "margin": float(f"{margin:.4g}"),
        "noise": margin <= context.tolerance.margin,
    }


def _contract(parting: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of the JSON contract."""
    if parting is None:
        return None
    keys = ("prompt", "position", "port_token", "reference_token", "margin")
    return {key: parting[key] for key in keys}


def _parting_words(parting: dict[str, Any]) -> str:
    return (
        f"{parting['prompt']}: at position {parting['position']} the port says {parting['port_token']}, the "
        f"reference {parting['reference_token']} with a lead of {parting['margin']:.3g} logits"
    )


@dataclass
class _Loops:
    """Outputs of the port that are degenerate."""

    context: LevelContext
    looked: int = 0
    degenerate: int = 0
    alone: list[str] = field(default_factory=list)
    """Where the reference's is not, and nothing explains it."""
    natural: list[str] = field(default_factory=list)
    """Where the reference's is not, after a divergence within the noise: a base model's."""

    def look(self, item: GoldenGreedy, tokens: list[int], *, after_noise: bool) -> None:
        self.looked += 1
        mine = self._degenerate(tokens)
        if mine is None:
            return
        self.degenerate += 1
        if self._degenerate(item.tokens.tolist()) is None:
            words = f"{item.name}: the port's output {mine}; the reference's does not"
            natural = after_noise and self.context.scope == "base"
            (self.natural if natural else self.alone).append(words)

    def problems(self) -> list[str]:
        if self.natural and self.degenerate / self.looked > self._bar:
            words = (
                f"{self.degenerate} of {self.looked} outputs are degenerate (bar {self._bar:.0%})"
            )
            return [*self.alone, words, *self.natural]
        return self.alone

    def figures(self) -> list[Figure]:
        found = [Figure(name="port's outputs that alone degenerate", value=len(self.alone), bar=0)]
        if self.context.scope == "base":
            name = "degenerate outputs"
            found.append(share(name, self.degenerate, self.looked, self._bar, "at-most"))
        return found

    @property
    def _bar(self) -> float:
        return self.context.bars.reference["base_loops"].value

    def _degenerate(self, ids: list[int]) -> str | None:
        stops = self.context.assets.stop_ids
        return degenerate([i for i in ids if i not in stops], self.context.assets.tokenizer)
