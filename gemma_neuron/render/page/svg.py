"""One matplotlib figure as an SVG element for a page: text as text, colours from the page's own variables."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, FIRST, SECOND, ALARM = "#010101", "#020202", "#030303", "#040404", "#050505"
VARIABLES = {INK: "ink", FAINT: "faint", FIRST: "first", SECOND: "second", ALARM: "bad"}
"""Colours that stand in for the page's, so that a plot follows light and dark."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
HALF, BROAD = (5.6, 3.2), (7.6, 2.8)
"""Inches: a half of the page's width, and all of it."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def svg(
    draw: Callable[[Axes], None], name: str, title: str, inches: tuple[float, float] = HALF
) -> Markup:
    """What `draw` draws. Ids begin with `name`, so that several figures can stand in one page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=NO_METADATA)
    text = out.getvalue()
    text = text[text.index("<svg ") :]  # no XML declaration and DOCTYPE inside a page
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(font: \d+(?:\.\d+)?px) [^;\"]*", r"\1 system-ui, sans-serif", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var(--{variable})")
    # matplotlib escapes the text it draws
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1))
