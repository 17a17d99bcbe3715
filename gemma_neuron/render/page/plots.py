"""The page's plots: logit distance by position, margins where tokens differ, drift by layer.

In: the details that levels 3, 4 and 5 and the drift carry. Out: `Plot`s, each an SVG element or a line why not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemma_neuron.render.page.svg import ALARM, BROAD, FAINT, FIRST, INK, SECOND, svg

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

    from gemma_neuron.reports import ValidationReport

LEAST = 1e-9
"""Smaller values are drawn here: a logarithm has no place for 0."""
Details = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plot:
    """`svg` None: nothing to draw, and `note` says why."""

    title: str
    note: str
    svg: Markup | None = None
    broad: bool = False
    """As wide as the page, for what has a value at every position."""


def plots(report: ValidationReport) -> list[Plot]:
    """All of them, drawn or not."""
    details = {item.level: item.detail for item in report.levels if item.detail}
    return [
        _distance(details, report.provenance.get("port", {}).get("window")),
        _margins(details),
        _drift(report.drift),
    ]


def _distance(details: Details, window: int | None) -> Plot:
    title = "Logit distance by position"
    texts = details.get(3, {}).get("by_position", {})
    points = details.get(4, {}).get("by_position", [])
    if not texts and not points:
        return Plot(title, "Levels 3 and 4 were not run.")

    def draw(axes: Axes) -> None:
        longest_first = sorted(texts.values(), key=lambda text: -len(text["relative"]))
        for number, text in enumerate(longest_first):
            axes.plot(
                [max(value, LEAST) for value in text["relative"]],
                color=FIRST,
                linewidth=0.9,
                alpha=0.4 if number else 1.0,
                label=None if number else "teacher-forced (level 3)",
            )
        if points:
            _scatter(axes, points, "position", "relative", SECOND, "prefill, decode (level 4)")
        _bar(axes, details.get(3, {}).get("tolerance", {}).get("relative"))
        if window is not None:
            axes.axvline(window, color=FAINT, linewidth=0.9, linestyle=":")
            axes.annotate(
                f" window {window}", (window, 0), xycoords=("data", "axes fraction"),
                xytext=(1, 4), textcoords="offset points", fontsize=8, color=INK,
            )  # fmt: skip
        _finish(axes, "position", "of the largest logit")

    note = (
        "The largest difference of a logit from stock transformers' at each position, as a share of the text's "
        "largest logit. Wrong positions, windows and buckets show as steps."
    )
    return Plot(title, note, svg(draw, "distance", title, BROAD), broad=True)


def _margins(details: Details) -> Plot:
    title = "Margins where the likeliest token differs"
    if 3 not in details and 5 not in details:
        return Plot(title, "Levels 3 and 5 were not run.")
    texts = details.get(3, {}).get("by_position", {})
    flips = [flip for text in texts.values() for flip in text["flips"]]
    partings = details.get(5, {}).get("divergences", [])
    if not flips and not partings:
        return Plot(title, "Port and reference choose the same token at every position looked at.")
    bar = (
        details.get(3, {}).get("tolerance", {}).get("margin", details.get(5, {}).get("margin_bar"))
    )

    def draw(axes: Axes) -> None:
        if flips:
            _scatter(axes, flips, "position", "margin", FIRST, "teacher-forced (level 3)", 20)
        if partings:
            _scatter(axes, partings, "position", "margin", SECOND, "generation (level 5)", 20)
        _bar(axes, bar)
        _finish(axes, "position", "logits")

    note = (
        "How far the reference's own choice leads the port's, in logits. Below the bar a flip is rounding; above it "
        "the port is wrong."
    )
    return Plot(title, note, svg(draw, "margins", title))


def _drift(drift: dict[str, Any] | None) -> Plot:
    title = "Drift by layer"
    if drift is None:
        return Plot(title, "Not asked for: validate --drift names the first layer that parts.")
    layers, first = drift["layers"], drift["first"]
    numbers = [layer["layer"] for layer in layers]

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        values = [max(layer["largest"], LEAST) for layer in layers]
        axes.plot(numbers, values, color=FAINT, linewidth=0.9)
        for kind, colour in (("sliding", FIRST), ("global", SECOND)):
            mine = [layer for layer in layers if layer["kind"] == kind]
            if mine:
                _scatter(axes, mine, "layer", "largest", colour, f"{kind} layer", 18)
        bars = [layer["bar"] for layer in layers]
        axes.plot(numbers, bars, color=ALARM, linewidth=0.9, linestyle="--", label="bar")
        if first is not None:
            axes.axvline(first["layer"], color=ALARM, linewidth=0.9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, "decoder layer", "of the hidden state")

    return Plot(title, drift["summary"], svg(draw, "drift", title))


def _scatter(
    axes: Axes, items: list[dict[str, Any]], x: str, y: str, colour: str, label: str, size: int = 8
) -> None:
    axes.scatter(
        [item[x] for item in items],
        [max(item[y], LEAST) for item in items],
        s=size,
        color=colour,
        linewidths=0,
        alpha=0.85,
        label=label,
        zorder=3,
    )


def _bar(axes: Axes, value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color=ALARM, linewidth=0.9, linestyle="--", label=f"bar {value:.2g}")


def _finish(axes: Axes, x: str, y: str) -> None:
    """A logarithmic axis with plain numbers, labels, and the legend above the data."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.6)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=8, handlelength=1.3,
        columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
