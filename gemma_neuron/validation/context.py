"""What every level is given, and the way it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.reports import LEVEL_NAMES, Figure, LevelResult, LevelStatus
from gemma_neuron.validation.answers import (
    SHOWN_TEXT,
    Judgement,
    judge,
    tool_call,
    turns_after_tool,
)
from gemma_neuron.validation.bars import Bars
from gemma_neuron.validation.golden import Golden
from gemma_neuron.validation.prompts import Conversation, GoldenPrompts, GreedyPrompt
from gemma_neuron.validation.questions import Question, QuestionSet
from gemma_neuron.validation.tolerance import Tolerance, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemma_neuron.backends.base import Runner
    from gemma_neuron.port import Port

AFTER_TOOL = "after-tool"
SHOWN = 5
"""Problems a level names in its reason and detail."""


@dataclass
class LevelContext:
    """One validation's inputs; levels add to `answers` and `facts` only.

    `talk.template` is what prompts are rendered with: the model's own, or the one forced on it
    (`forced`, its name). `answers` holds the port's generations by prompt name, made in level 5 and
    judged in level 6. `facts` carries figures to the report.
    """

    port: Port
    runner: Runner
    talk: Conversation
    questions: QuestionSet
    prompts: GoldenPrompts
    bars: Bars
    forced: str | None = None
    checkpoint: Path | None = None
    golden: Golden | None = None
    base_asked: bool = False
    answers: dict[str, list[int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def assets(self) -> ChatAssets:
        return self.talk.assets

    @property
    def scope(self) -> str:
        return self.talk.scope

    @property
    def reference(self) -> Golden:
        assert self.golden is not None
        return self.golden

    @cached_property
    def tolerance(self) -> Tolerance:
        return tolerance(self.bars, self.reference, self.port.spec.dtype)

    @cached_property
    def by_name(self) -> dict[str, Question]:
        return dict(self.questions.for_scope(self.scope))

    def in_golden(self, name: str) -> bool:
        """Whether the golden went on from this very prompt: made with other questions, it has others by that name."""
        prompt, found = self.prompt(name), self.reference.greedy.get(name)
        return prompt is not None and found is not None and found.prompt.tolist() == [*prompt.ids]

    def prompt(self, name: str) -> GreedyPrompt | None:
        return next((p for p in self.prompts.greedy if p.name == name), None)


def follow_up(
    talk: Conversation, questions: dict[str, Question], prompt: GreedyPrompt, ids: Sequence[int]
) -> GreedyPrompt | None:
    """The prompt with the tool's result, when `ids` called the tool a question asks for."""
    question = questions.get(prompt.name)
    if question is None or question.kind != "tool":
        return None
    call = tool_call(ids, talk.assets)
    if call is None or call[0] != question.tool_call:
        return None
    return talk.prompt(f"{prompt.name}/{AFTER_TOOL}", question, turns_after_tool(question, call))


def judge_all(
    context: LevelContext, answer: Callable[[str], Sequence[int] | None]
) -> list[Judgement]:
    """Judge every question whose first answer is there; a tool question by its last."""
    out = []
    for name, question in context.by_name.items():
        ids = answer(name)
        if ids is None:
            continue
        if question.kind == "tool":
            last = answer(f"{name}/{AFTER_TOOL}")
            if last is None:
                out.append(_no_call(context, name, question, ids))
                continue
            ids = last
        out.append(judge(name, question, ids, context.assets.stop_ids, context.assets))
    return out


def _no_call(context: LevelContext, name: str, question: Question, ids: Sequence[int]) -> Judgement:
    text = context.assets.tokenizer.decode(list(ids), skip_special=False)
    return Judgement(
        name=name,
        kind=question.kind,
        asked=question.turns,
        expected=question.answers,
        right=False,
        ended=bool(ids) and ids[-1] in context.assets.stop_ids,
        problems=(f"did not call {question.tool_call}",),
        text=text[:SHOWN_TEXT],
    )


def result(
    level: int,
    status: LevelStatus,
    reason: str,
    detail: dict[str, Any] | None = None,
    figures: Sequence[Figure] = (),
) -> LevelResult:
    """A LevelResult under the level's contract name; the validator adds the time."""
    return LevelResult(
        level=level,
        name=LEVEL_NAMES[level],
        status=status,
        reason=reason,
        detail=detail or {},
        figures=tuple(figures),
    )


def from_problems(
    level: int,
    problems: Sequence[str],
    passed: str,
    detail: dict[str, Any],
    figures: Sequence[Figure] = (),
) -> LevelResult:
    """fail with the first problem (and how many more), or pass with `passed`."""
    if not problems:
        return result(level, "pass", passed, detail, figures)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    found = {**detail, "problems": list(problems[:SHOWN])}
    return result(level, "fail", problems[0] + more, found, figures)
