"""What is known of this machine's future: EC2's notices, polled, and the signals that ask this process to end.

A thread polls; the signal handlers only take a note. The controller asks between two things it does, and what it
learns first becomes an event then.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Literal, Self

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import Failure, InstanceMetadata
from gemma_neuron.errors import Cancelled, Interrupted

POLL_SECONDS = 5.0
"""As AWS recommends for spot/instance-action."""
TRIES = 3
"""Polls without any answer after which there is no instance metadata here."""
NOTICE_SECONDS = 120.0
"""A spot instance's notice, where its own time cannot be read."""
FLUSH_SECONDS = 30.0
"""Of a notice, kept for flushing: running units may go on until then."""
GO_ON = "Run the same command to go on."
Outlook = Literal["clear", "unknown", "rebalance", "notice"]


class Notices:
    """Inside its `with` block SIGTERM and Ctrl-C no longer end the process but are noted here, once: a second Ctrl-C
    is a KeyboardInterrupt. `tell`: what people are told."""

    def __init__(
        self,
        events: EventLog,
        metadata: InstanceMetadata | None = None,
        tell: Callable[[str], None] = lambda _: None,
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.outlook: Outlook = "clear"
        self._events, self._metadata, self._tell = events, metadata, tell
        self._poll_seconds = poll_seconds
        self._ending: tuple[Interrupted, float] | None = None
        self._why, self._told = "", ("clear", "")
        self._stop = threading.Event()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._signalled)
        if self._metadata is not None:
            threading.Thread(target=self._poll, name="notices", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def cautious(self) -> bool:
        """Whether the machine may go soon, or nobody can say that it will not: nothing long is to be started."""
        return self.outlook != "clear"

    def ending(self) -> tuple[Interrupted, float] | None:
        """What ends this run, and until when (monotonic clock) running units may go on; None while nothing does.

        Called by the controller; says and logs what is new.
        """
        ending = self._ending
        now = (self.outlook, str(ending[0]) if ending is not None else self._why)
        if now != self._told:
            self._told = now
            left = (
                {} if ending is None else {"seconds_left": round(ending[1] - time.monotonic(), 1)}
            )
            self._events.emit("notice", outlook=now[0], why=now[1], **left)
            self._tell(f"{now[1] or 'no notice stands any more'}")
        return ending

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._ending is not None and isinstance(self._ending[0], Cancelled):
                raise KeyboardInterrupt
            error: Interrupted = Cancelled("Stopped by Ctrl-C: what was finished is kept.", GO_ON)
        else:
            error = Interrupted("Stopped by SIGTERM with work left.", GO_ON)
        self._ending = (error, time.monotonic())

    def _poll(self) -> None:
        assert self._metadata is not None
        answered, failures = False, 0
        while True:
            try:
                self._read(self._metadata)
                answered, failures = True, 0
            except Failure as error:
                failures += 1
                if not answered and failures >= TRIES:
                    return
                if answered and self.outlook != "notice":
                    self.outlook = "unknown"
                    self._why = (
                        f"instance metadata answers no more ({error}): a notice would not be seen"
                    )
            if self._stop.wait(self._poll_seconds):
                return

    def _read(self, metadata: InstanceMetadata) -> None:
        action = metadata.get("spot/instance-action")
        rebalance = metadata.get("events/recommendations/rebalance")
        if action is not None:
            self._taken_away(action)
        elif self.outlook != "notice":
            self.outlook = "clear" if rebalance is None else "rebalance"
            self._why = (
                "" if rebalance is None else "EC2 recommends leaving this instance (rebalance)"
            )

    def _taken_away(self, text: str) -> None:
        """`text`: {"action": "terminate", "time": "2026-01-31T12:00:00Z"}; what cannot be read counts all the same."""
        try:
            found = json.loads(text)
            when = datetime.fromisoformat(found["time"]).astimezone(UTC)
            action, left = str(found["action"]), when.timestamp() - time.time()
        except (ValueError, KeyError, TypeError):
            action, left = "terminate", NOTICE_SECONDS
        self.outlook = "notice"
        if self._ending is None:
            error = PreemptionNotice(
                f"Spot notice: EC2 will {action} this instance", seconds=max(0.0, left)
            )
            self._ending = (error, time.monotonic() + max(0.0, left - FLUSH_SECONDS))
