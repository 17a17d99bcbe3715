"""Long work on stderr: bytes, share and rate, a bar on a terminal and a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gemma_neuron.render import PROGRESS_SECONDS, notice, on_terminal, safe, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ByteProgress:
    """Stages of work counted in bytes. `label` names the first one, whose size nobody told."""

    def __init__(self, label: str = "") -> None:
        self.live = on_terminal()
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.label, self.total, self.done = label, 0, 0
        self.started = self.shown = time.monotonic()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, label: str, total: int) -> None:
        """A stage of `total` bytes; the one before is over."""
        self.close()
        self.label, self.total, self.done = label, total, 0
        self.started = self.shown = time.monotonic()

    def __call__(self, count: int, of: int | str) -> None:
        """`count` more bytes are done, of a rank or of a tensor."""
        self.done += count
        what = f"{self.label}: {f'rank {of}' if isinstance(of, int) else safe(of)}"
        if self.live:
            self._move(count, what)
            return
        now = time.monotonic()
        if now - self.shown >= 10 * PROGRESS_SECONDS:
            self.shown = now
            notice(f"{what}, {self._figures(now)}")

    def close(self) -> None:
        """The end of a stage: the bar goes; where lines were printed, a last one says how fast it was."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        elif self.shown > self.started:
            notice(f"{self.label}: {self._figures(time.monotonic())}")

    def _figures(self, now: float) -> str:
        rate = size(self.done / max(now - self.started, 1e-9))
        of = f" of {size(self.total)} ({self.done / self.total:.0%})" if self.total else ""
        return f"{size(self.done)}{of} at {rate}/s"

    def _move(self, count: int, what: str) -> None:
        if self.bar is None:
            self.bar = _bar()
            self.task = self.bar.add_task(what, total=self.total or None)
        assert self.task is not None
        self.bar.update(self.task, advance=count, description=what)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar
