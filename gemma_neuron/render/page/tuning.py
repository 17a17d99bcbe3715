"""`tune --report`: the loss with the faults marked, what each cost, and what the run was."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.render.page import rendered
from gemma_neuron.render.page.plots import Plot
from gemma_neuron.render.page.svg import ALARM, BROAD, FAINT, FIRST, SECOND, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gemma_neuron.tuning.story import Incident, Story

LINES = {"fault": ALARM, "growth": SECOND, "start": FAINT}
"""Incidents drawn into the plot, by kind."""
NAMES = {"fault": "replica lost", "growth": "grown back", "start": "started again"}


def write_tune_page(story: Story, path: Path) -> None:
    """Put the page at `path`, whole or not at all."""
    from gemma_neuron.artifacts import write_atomic

    write_atomic(path, tune_page(story).encode("utf-8"))


def tune_page(story: Story) -> str:
    """The page's text."""
    record, recipe = story.record, story.record.recipe
    steps = len(story.losses)
    faults = [item for item in story.incidents if item.kind == "fault"]
    down = sum(item.downtime_seconds or 0.0 for item in story.incidents)
    provenance = {
        "run": record.id,
        "base": record.base,
        "samples": record.samples,
        **{f"recipe.{name}": value for name, value in recipe.model_dump(mode="json").items()},
        **{f"versions.{name}": value for name, value in record.versions.items()},
    }
    variables = {
        "record": record,
        "verdict": "finished" if story.done else "not finished",
        "tone": "good" if story.done else "open",
        "decided": f"{steps} of {recipe.steps} steps"
        + (
            f", loss {story.losses[0]:.4f} at first, {story.losses[-1]:.4f} at last"
            if steps
            else ""
        ),
        "facts": [
            ("model", record.model),
            ("data", f"{record.data}, {recipe.samples} samples"),
            ("rank", recipe.rank),
            ("batch", recipe.batch),
            ("replicas lost", len(faults)),
            ("steps lost", sum(item.lost_steps or 0 for item in faults)),
            ("down", f"{down:.1f} s"),
        ],
        "plots": [_loss(story), _replicas(story)],
        "incidents": [_row(item) for item in story.incidents],
        "provenance": [(name, _text(value)) for name, value in provenance.items()],
    }
    return rendered("tuning/report.html.jinja", variables)


def _loss(story: Story) -> Plot:
    title = "Loss by step"
    if not story.losses:
        return Plot(title, "No step was done yet.")

    def draw(axes: Axes) -> None:
        steps = range(1, len(story.losses) + 1)
        axes.plot(steps, story.losses, color=FIRST, linewidth=1.1)
        named: set[str] = set()
        for number, item in enumerate(story.incidents, 1):
            if item.kind not in LINES or item.step is None:
                continue
            label = NAMES[item.kind] if item.kind not in named else None
            named.add(item.kind)
            colour = LINES[item.kind]
            axes.axvline(item.step, color=colour, linewidth=0.9, linestyle="--", label=label)
            axes.annotate(
                f" {number}", (item.step, 1), xycoords=("data", "axes fraction"), fontsize=8,
                color=colour, verticalalignment="top",
            )  # fmt: skip
        _finish(axes, "loss", legend=bool(named))

    note = "Mean over the learned tokens of a step. Numbers are those of the table below."
    if story.redone:
        same = f"{story.redone - story.unequal} of them with the very same loss"
        note += f" {story.redone} steps were done again after a fault, {same}."
    return Plot(title, note, svg(draw, "loss", title, BROAD), broad=True)


def _replicas(story: Story) -> Plot:
    title = "Replicas by step"
    known = [(step, count) for step, count in enumerate(story.replicas, 1) if count]
    if not known:
        return Plot(title, "No step was done here.")

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.step(*zip(*known, strict=True), color=SECOND, linewidth=1.1, where="mid")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        _finish(axes, "replicas", legend=False)

    note = "How many computed each step. Its result does not depend on it."
    return Plot(title, note, svg(draw, "replicas", title, BROAD), broad=True)


def _finish(axes: Axes, y: str, *, legend: bool) -> None:
    axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(y)
    if legend:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=8, borderaxespad=0.2
        )


def _row(item: Incident) -> dict[str, Any]:
    moment = datetime.fromtimestamp(item.time, UTC)
    return {
        "time": moment.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "what": item.what,
        "tone": "bad" if item.kind in ("fault", "refusal") else "open",
        "step": _text(item.step),
        "restored": _text(item.restored_step),
        "lost": _text(item.lost_steps),
        "replicas": _text(item.replicas),
        "down": "–" if item.downtime_seconds is None else f"{item.downtime_seconds:.2f}",
    }


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
