"""The time of a wait: how long it lasts, when to look again, and when to give up. Clock and sleep are arguments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from gemma_neuron.errors import NoCapacityError
from gemma_neuron.spot.fleet import Sleep

JITTER = 0.1
"""Of the seconds between two rounds: many who wait shall not all ask at once."""


class Patience:
    """A wait in rounds, `poll` seconds apart, for `timeout` seconds in all (None: no end). It begins now."""

    def __init__(
        self,
        poll: float,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        self.poll, self.timeout, self.clock, self.sleep = poll, timeout, clock, sleep
        self._started = clock()

    @property
    def gone(self) -> float:
        """Seconds since the wait began."""
        return self.clock() - self._started

    def rest(
        self,
        given_up: Callable[[float], NoCapacityError],
        before: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Sleep until the next round, `before` told for how long; raises `given_up(seconds gone)` where it would come
        after the end."""
        seconds = self.poll * random.uniform(1 - JITTER, 1 + JITTER)
        gone = self.gone
        if self.timeout is not None and gone + seconds > self.timeout:
            raise given_up(gone)
        before(seconds)
        self.sleep(seconds)


class Lately:
    """Whether something was done within the last `seconds`; at first it was not."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock, self._last = seconds, clock, float("-inf")

    def __bool__(self) -> bool:
        return self._clock() - self._last < self._seconds

    def done(self) -> None:
        self._last = self._clock()
