"""Level 7, extra: what the served port reaches in tasks of lm-eval. Reported; it does not change the verdict.

In: figures by task. Bars: those of the package's own tasks (`[task]` in bars.toml, by task name); a stock task has
none here and is reported as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_neuron.reports import Figure, LevelResult
from gemma_neuron.validation.bars import read_bars
from gemma_neuron.validation.context import from_problems

if TYPE_CHECKING:
    from gemma_neuron.validation.tasks import TaskFigures

LEVEL = 7
JUDGED = "acc"


def task_level(found: TaskFigures) -> LevelResult:
    """Figures of every task, judged where there is a bar."""
    bars = read_bars().task
    figures, problems = [], []
    for task, values in found.items():
        if task not in bars:
            continue
        bar = bars[task].value
        figures.append(
            Figure(name=f"{task}, {JUDGED}", value=values[JUDGED], bar=bar, sense="at-least")
        )
        if values[JUDGED] < bar:
            problems.append(f"{task}: {JUDGED} {values[JUDGED]:.2f} (bar {bar:.2f})")
    words = "; ".join(f"{task} {_words(values)}" for task, values in found.items())
    return from_problems(LEVEL, problems, words, {"tasks": found}, figures)


def _words(values: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items() if name != "samples")
    return f"{shown} ({values['samples']:g} asked)"
