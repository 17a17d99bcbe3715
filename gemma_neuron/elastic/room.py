"""Room for workers: how many there may be, and how long the place of one that is gone stays empty."""

from __future__ import annotations

import time


class Room:
    """`limit` workers at once; a place that was left is taken again after `regrow_seconds`."""

    def __init__(self, limit: int, regrow_seconds: float = 0.0) -> None:
        self.limit, self.regrow_seconds = limit, regrow_seconds
        self._free_from: list[float] = []

    def left(self) -> None:
        """A worker is gone."""
        self._free_from.append(time.monotonic() + self.regrow_seconds)

    def free(self, taken: int) -> int:
        """Places for more, `taken` being in use."""
        now = time.monotonic()
        self._free_from = [free for free in self._free_from if free > now]
        return max(0, self.limit - taken - len(self._free_from))
