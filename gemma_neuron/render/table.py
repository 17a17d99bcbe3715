"""Tables on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gemma_neuron.render import safe

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


def _console() -> Console:
    """Wide enough for the tables where nobody can widen the window: in a pipe or a log."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            """The command line says how a program ends whose reader went away; rich would exit with 1."""
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Plain(highlight=False, width=width)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = True
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if numbers and i else "left")
    for row in rows:
        shown.add_row(*(Text(safe(cell)) for cell in row))
    _console().print(shown)
