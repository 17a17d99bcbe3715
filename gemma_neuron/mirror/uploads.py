"""Threads that upload beside the work: they try on through any trouble with the store until they are told to end.

In: a lease, and functions that send what waits. Out: by `finish`, all that waited is in the bucket, or an error says
what is not. Trouble is said once a minute and never stops the work.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gemma_neuron.errors import GemmaNeuronError, NotMirroredError, OwnerLostError
from gemma_neuron.mirror.owner import Owner
from gemma_neuron.mirror.parts import step_back

SAY_SECONDS = 60.0
LEFT_SECONDS = 5.0
"""Between two lines about what is left, at the end."""
LONGEST_WAIT, DOUBLINGS = 30.0, 5
"""Seconds between two tries while the store is in trouble, and after how many troubles in a row they are reached."""
JOIN_SECONDS, RELEASE_SECONDS = 0.25, 5.0
"""Between two looks whether a thread has ended; how long all of them get for a request under way, once told to stop."""

Push = Callable[[], bool]
"""Sends what waits; whether there was nothing. What it raises of the store, the disk or a file is tried again."""


class StoppedError(Exception):
    """The time for uploads is over."""


class Uploads:
    """Threads that push under one lease. `tell`: lines for people; `noted`: (event, its fields), for a log.

    `lost`: set once another has taken the lease over; nothing is sent after that.
    """

    def __init__(
        self,
        owner: Owner,
        tell: Callable[[str], None],
        noted: Callable[[str, dict[str, Any]], None] = lambda event, facts: None,
    ) -> None:
        self.owner, self.tell, self._noted = owner, tell, noted
        self.lost: OwnerLostError | None = None
        self._stop, self.closing = threading.Event(), threading.Event()
        self._free = threading.Event()
        """Set while no urgent thread sends."""
        self._free.set()
        self._news: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self._said, self._trouble = -SAY_SECONDS, ""

    def add(self, push: Push, name: str, rest: float | None, *, urgent: bool = True) -> None:
        """A thread that pushes; with nothing to send it rests `rest` seconds, or until `wake` (None).

        What is not `urgent` asks `give_way` before each request, where an urgent one asks `check`.
        """
        news = threading.Event()
        arguments = (self._alone(push) if urgent else push, news, rest)
        thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._news.append(news)
        self._threads.append(thread)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There is something to send."""
        for news in self._news:
            news.set()

    def check(self) -> None:
        """Raises StoppedError when nothing more is to be sent."""
        if self._stop.is_set():
            raise StoppedError

    def give_way(self) -> None:
        """Wait while something urgent is sent. Raises StoppedError as `check` does."""
        self.check()
        while not self._free.wait(JOIN_SECONDS):
            self.check()

    def _alone(self, push: Push) -> Push:
        def pushing() -> bool:
            self._free.clear()
            try:
                return push()
            finally:
                self._free.set()

        return pushing

    def finish(self, grace: float, left: Callable[[], str], where: str) -> None:
        """Wait until nothing is left, at most `grace` seconds, and give the lease back.

        `left`: what is not in the bucket, in words. Raises NotMirroredError when there is something, OwnerLostError
        when another has taken over.
        """
        self.closing.set()
        self.wake()
        self._wait(grace, left)
        self._stop.set()
        self.wake()
        end = time.monotonic() + RELEASE_SECONDS
        for thread in self._threads:
            if thread.is_alive():  # one that connected at the very end may not have started
                thread.join(max(0.0, end - time.monotonic()))
        remaining = left()
        self.owner.release()
        if self.lost is not None:
            raise self.lost
        if remaining:
            raise NotMirroredError(
                f"{remaining} not mirrored to {where}{': ' + self._trouble if self._trouble else '.'}",
                "Run the same command again: it uploads what is missing.",
            )

    def _wait(self, grace: float, left: Callable[[], str]) -> None:
        deadline = time.monotonic() + grace
        said = time.monotonic()
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(JOIN_SECONDS)
                if thread.is_alive() and time.monotonic() - said > LEFT_SECONDS:
                    said = time.monotonic()
                    self.tell(f"mirror: {left()} left")

    def _run(self, push: Push, news: threading.Event, rest: float | None) -> None:
        """Push until the end is near and nothing is left; wait longer after each trouble in a row."""
        step_back()
        troubles = 0
        while not self._stop.is_set():
            news.clear()  # before the look: what comes after it is seen at the next one
            try:
                idle = push()
                troubles = 0
            except StoppedError:
                return
            except OwnerLostError as error:
                self._give_up(error)
                return
            except (
                Exception
            ) as error:  # whatever it is: a thread that ends mirrors nothing from then on
                troubles += 1
                self._say(error)
                self._stop.wait(
                    min(LONGEST_WAIT, 2.0 ** min(troubles, DOUBLINGS)) * random.uniform(0.5, 1.0)
                )
                continue
            if idle and self.closing.is_set():
                return
            if idle:
                news.wait(rest)

    def _give_up(self, error: OwnerLostError) -> None:
        self.lost = error
        with suppress(OSError):
            self.tell(f"warning: {error.message}")
            self._noted("owner_lost", {})

    def _say(self, error: Exception) -> None:
        known = isinstance(error, GemmaNeuronError | OSError)
        self._trouble = str(error) if known else f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            with suppress(OSError):  # the terminal is closed, or the disk is full
                self.tell(f"warning: the mirror is behind, trying on: {self._trouble}")
                self._noted("mirror_stalled", {"why": self._trouble})
