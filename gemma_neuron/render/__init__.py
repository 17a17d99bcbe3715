"""How results look: tables and progress on a terminal, one JSON document with `--json`.

Results go to stdout, progress, warnings and hints to stderr. The only importer of rich. Text that came from
files or the network is shown with control bytes escaped.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

from gemma_neuron import logs
from gemma_neuron.errors import GemmaNeuronError

SCHEMA_VERSION = 1
PROGRESS_SECONDS = 1.0


def safe(text: object) -> str:
    """Text with control characters escaped: a file's name must not move the terminal's cursor."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def emit_json(fields: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout."""
    _to_stdout([json.dumps({"schema": SCHEMA_VERSION, **fields}, indent=1)])


def emit_lines(lines: Iterable[str]) -> None:
    _to_stdout(safe(line) for line in lines)


def _to_stdout(lines: Iterable[str]) -> None:
    """Raises OSError that names standard output; BrokenPipeError, the reader's own choice, as it is."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "Standard output") from error


def on_terminal() -> bool:
    """Whether a line of stderr may move."""
    return sys.stderr.isatty() and not logs.as_json()


def notice(line: str, level: int = logging.INFO) -> None:
    """One line of progress, a warning or a hint, on stderr."""
    if logs.as_json():
        logs.say(level, line)
        return
    try:
        sys.stderr.write(safe(line) + "\n")
        sys.stderr.flush()
    except OSError as error:
        if error.errno != errno.EIO:  # of a terminal that was closed: the work goes on without it
            raise


def show_error(error: GemmaNeuronError, as_json: bool) -> None:
    """What was tried, found, needed, then the hint line; with `--json` also the document on stdout."""
    notice(f"error: {_shortened(error.message)}", logging.ERROR)
    if error.hint:
        notice(f"hint: {_shortened(error.hint)}")
    if as_json:
        emit_json({"error": error.to_json()})


def _shortened(text: str) -> str:
    """Without the middle of what no line could hold: an argument of a hundred kilobytes would bury the message."""

    def short(found: re.Match[str]) -> str:
        word = found.group()
        return f"{word[:200]} … {word[-100:]} ({len(word):,} characters)"

    return re.sub(r"\S{1000,}", short, text)


class Ticker:
    """Many small steps: one moving line on a terminal, else a plain line every few seconds."""

    def __init__(self) -> None:
        self.shown, self.live = 0.0, on_terminal()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if self.live:
            sys.stderr.write(f"\r\x1b[K{safe(line)}")
            sys.stderr.flush()
        elif now - self.shown >= 5 * PROGRESS_SECONDS:
            self.shown = now
            notice(line)

    def close(self) -> None:
        if self.live:
            sys.stderr.write("\r\x1b[K")


def size(count: float) -> str:
    """Bytes in decimal units, as storage and memory of the accelerators are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
