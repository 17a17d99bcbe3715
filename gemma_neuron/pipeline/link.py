"""A mirror that is there from the start, or as soon as its store answers: the work does not wait for it.

In: a way to connect. Out: the mirror, at the latest at the end of the work, or NotMirroredError.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gemma_neuron.errors import GemmaNeuronError, NetworkError, NotMirroredError


class Finishing(Protocol):
    """What a mirror can do at the end; see `mirror.uploads`."""

    def finish(self, grace: float | None = None) -> None: ...


Made = TypeVar("Made", bound=Finishing)
FIRST_WAIT, LONGEST_WAIT = 2.0, 30.0
"""Seconds between two tries to connect: doubled each time, with jitter."""


class Link(Generic[Made]):
    """`connect`: takes the lease; it raises NetworkError while the store cannot be reached, and is then tried again.

    `uri`, `tell`: for what people are told.
    """

    def __init__(
        self,
        connect: Callable[[], Made],
        uri: str,
        tell: Callable[[str], None],
        patience: float = 0.0,
    ) -> None:
        """Connects if it can, waiting `patience` seconds for a store that is away. Raises MirrorInUseError or
        AccessError."""
        self._connect, self._uri, self._tell = connect, uri, tell
        self._ready: Callable[[Made], None] = lambda made: None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: GemmaNeuronError | None = None
        self.mirror: Made | None = None
        self._first(patience)

    def _first(self, patience: float) -> None:
        end, wait = time.monotonic() + patience, FIRST_WAIT
        waiting = False
        while True:
            try:
                self.mirror = self._connect()
                return
            except NetworkError as error:
                left = end - time.monotonic()
                if left <= 0:
                    self._tell(f"warning: working without the mirror for now: {error.message}")
                    return
                if not waiting:
                    waiting = True
                    self._tell(
                        f"warning: waiting up to {patience:.0f} s for the mirror, which may hold what would be made "
                        f"anew: {error.message}"
                    )
            time.sleep(min(left, wait * random.uniform(0.5, 1.0)))
            wait = min(LONGEST_WAIT, 2 * wait)

    def start(self, ready: Callable[[Made], None]) -> None:
        """Call `ready` with the mirror: now, or from a thread that tries on beside the work."""
        self._ready = ready
        if self.mirror is not None:
            ready(self.mirror)
            return
        self._thread = threading.Thread(target=self._try_on, name="mirror-link", daemon=True)
        self._thread.start()

    def finish(self, seconds: float, *, only_reached: bool = False) -> None:
        """The end of the work: what is left is sent within `seconds`. Raises what the mirror's `finish` raises.

        A store that was never reached is asked once more, and NotMirroredError raised if it is still away, or what
        kept the mirror from being connected to meanwhile; with `only_reached` (the work ended by an error of its own,
        which comes first) neither.
        """
        end = time.monotonic() + seconds
        self._over.set()
        if self._thread is not None:
            self._thread.join(seconds)
        mirror = self.mirror
        if mirror is None and not only_reached:
            mirror = self._last_try()
        if mirror is not None:
            mirror.finish(max(0.0, end - time.monotonic()))

    def _last_try(self) -> Made:
        if self._problem is not None:
            raise self._problem
        mirror = None
        if self._thread is None or not self._thread.is_alive():
            self._tell("mirror: trying the store once more")
            mirror = self._once()
        if mirror is None:
            raise NotMirroredError(
                f"Nothing was mirrored to {self._uri}: the store cannot be reached.",
                "Run the same command again: it uploads what is missing.",
            )
        return mirror

    def _try_on(self) -> None:
        wait = FIRST_WAIT
        while not self._over.wait(wait * random.uniform(0.5, 1.0)):
            wait = min(LONGEST_WAIT, 2 * wait)
            try:
                if self._once() is not None:
                    self._tell(f"mirror: {self._uri} is reached now")
                    return
            except GemmaNeuronError as error:
                self._problem = error
                self._tell(f"warning: working without the mirror: {error.message}")
                return

    def _once(self) -> Made | None:
        try:
            mirror = self._connect()
        except NetworkError:
            return None
        self.mirror = mirror  # first: what the work hands over from now on reaches it
        self._ready(mirror)
        return mirror
