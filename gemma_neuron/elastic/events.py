"""Every fault and recovery as one line with its times, so that downtime is a figure.

A sink takes (event name, fields); a port's `events.jsonl` is one. Seconds are of the monotonic clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

Sink = Callable[[str, dict[str, Any]], None]


class EventLog:
    """Sends events to a sink and keeps the totals of one run."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self.counts: dict[str, int] = {}
        self.downtime_seconds = 0.0
        self._down_since: float | None = None

    def emit(self, event: str, **fields: Any) -> None:
        """One event, with the pid of this process."""
        self.counts[event] = self.counts.get(event, 0) + 1
        if self._sink is not None:
            self._sink(event, {"pid": os.getpid(), **fields})

    def down(self) -> None:
        """Work stands still from now on."""
        if self._down_since is None:
            self._down_since = time.monotonic()

    def resumed(self, **fields: Any) -> float:
        """Work goes on; the seconds it stood still, also sent as `resumed`."""
        if self._down_since is None:
            return 0.0
        seconds = time.monotonic() - self._down_since
        self._down_since = None
        self.downtime_seconds += seconds
        self.emit("resumed", downtime_seconds=round(seconds, 4), **fields)
        return seconds
