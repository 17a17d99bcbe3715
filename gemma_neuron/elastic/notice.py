"""What is known of this machine's future: EC2's notices, polled, and the signals that ask this process to end.

A thread polls. What asks for the end is raised where the main thread stands, or, where work can be ended in good order
(`noting`), only taken note of: the controller asks between two things it does, and what it learns first becomes an
event then.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Literal, Self

from gemma_neuron import interrupts, machine
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import DISABLED, TIMEOUT_SECONDS, Failure, InstanceMetadata
from gemma_neuron.errors import Cancelled, Interrupted

POLL_SECONDS = 5.0
"""As AWS recommends for spot/instance-action."""
TRIES = 3
"""Polls without any answer after which there is no instance metadata here."""
NOTICE_SECONDS = 120.0
"""A spot instance's notice, where its own time cannot be read."""
UPLOAD_SECONDS = 60.0
"""What uploads get at most once this process was asked to end."""
ENDING_SECONDS = 30.0
"""After them: threads that wait for a store, the lease given back, the interpreter's end."""
FLUSH_SECONDS = UPLOAD_SECONDS + ENDING_SECONDS
"""Of a notice, kept for both: running units may go on until then."""
UNKNOWN_SECONDS = NOTICE_SECONDS
"""How long nothing long is started after metadata stopped answering: of a notice given just then, the machine would be
gone by the end of it."""
GO_ON = "Run the same command to go on."
Outlook = Literal["clear", "unknown", "rebalance", "notice"]
ENDING = ("SIGTERM", "SIGHUP")
"""Signals that ask for the end; the second comes when the terminal is closed."""


class Notices:
    """Inside its `with` block a notice, SIGTERM, SIGHUP or Ctrl-C is raised where the main thread stands: as
    `interrupts.Stop`, which leaves the block as the error it carries, or KeyboardInterrupt. Inside `noting` it is kept
    for `ending`. A second Ctrl-C is `interrupts.AtOnce` everywhere. `tell`: what people are told; `events`: where what
    is heard is logged.
    """

    def __init__(
        self,
        metadata: InstanceMetadata | None = None,
        tell: Callable[[str], None] = lambda _: None,
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.outlook: Outlook = "clear"
        self.events = EventLog()
        self.tell = tell
        self._metadata, self._poll_seconds = metadata, poll_seconds
        self._ending: tuple[Interrupted, float] | None = None
        self._deadline = float("inf")
        self._raised: Interrupted | None = None
        self._why, self._told = "", ("clear", "")
        self._unknown_since = 0.0
        self._noting = self._cancelled = self._rings = False
        self._stop, self._polled = threading.Event(), threading.Event()
        self._polled.set()
        self._lock = threading.Lock()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", *ENDING):
                number = getattr(signal, name)
                if signal.getsignal(number) is not signal.SIG_IGN:  # so whoever started us wants it
                    self._handlers[number] = signal.signal(number, self._signalled)
        if self._metadata is not None:
            self._polled.clear()
            threading.Thread(target=self._poll, name="notices", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._noting = True  # nothing is raised any more
        with self._lock:
            self._stop.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        # C code puts errors of its own in the place of a handler's: what was raised here is what ends this.
        asked = self._raised if isinstance(error, Exception) else None
        if isinstance(error, interrupts.Stop):
            asked = error.error
        if asked is not None:
            self.ending()
            raise asked from None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within it nothing is raised but AtOnce: `ending` says what was heard, and whoever comes next asks it."""
        self._polled.wait(2 * TIMEOUT_SECONDS)  # so that what stands already is known
        before, self._noting = self._noting, True
        try:
            yield
        finally:
            self._noting = before

    @property
    def cautious(self) -> bool:
        """Whether the machine may go soon, or nobody can say that it will not: nothing long is to be started."""
        if self.outlook == "unknown":
            return time.monotonic() - self._unknown_since < UNKNOWN_SECONDS
        return self.outlook != "clear"

    def ending(self) -> tuple[Interrupted, float] | None:
        """What ends this run, and until when (monotonic clock) running units may go on; None while nothing does.

        Called by the controller; says and logs what is new.
        """
        ending = self._ending
        why = self._why
        if ending is None and self.outlook == "unknown" and not self.cautious:
            why = (
                f"warning: going on without notices: instance metadata has not answered for {UNKNOWN_SECONDS:.0f} s; "
                f"{DISABLED}=true has nobody ask it"
            )
        now = (self.outlook, str(ending[0]) if ending is not None else why)
        if now != self._told:
            self._told = now
            left = (
                {} if ending is None else {"seconds_left": round(ending[1] - time.monotonic(), 1)}
            )
            self.events.emit("notice", outlook=now[0], why=now[1], **left)
            self.tell(f"{now[1] or 'no notice stands any more'}")
        return ending

    def upload_seconds(self) -> float:
        """What uploads may take from now on, so that the process has ended before the machine is taken away."""
        left = self._deadline - time.monotonic() - ENDING_SECONDS
        return max(0.0, min(UPLOAD_SECONDS, left))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        error: Interrupted | None = None
        if number == signal.SIGINT:
            if self._cancelled:
                raise interrupts.AtOnce
            self._cancelled = True
            error = Cancelled("Stopped by Ctrl-C: what was finished is kept.", GO_ON)
        elif not self._rings:
            name = signal.Signals(number).name
            error = Interrupted(f"Stopped by {name} with work left.", GO_ON)
        self._rings = False
        if error is not None:
            self._ending = (error, time.monotonic())
        if not self._noting:
            self._raise()

    def _raise(self) -> None:
        assert self._ending is not None
        self._raised = error = self._ending[0]
        if isinstance(error, Cancelled):
            raise KeyboardInterrupt
        raise interrupts.Stop(error)

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
                    self._miss()
                    return
                if answered and self.outlook != "notice":
                    self._lose_sight(error)
            self._polled.set()
            if self._stop.wait(self._poll_seconds):
                return

    def _miss(self) -> None:
        """Nobody answers. On any other machine that is as it should be."""
        if machine.is_ec2():
            self._why = (
                "warning: this is an EC2 instance and its metadata does not answer: a spot notice will not be seen "
                "(in a container, raise the hop limit: HttpPutResponseHopLimit 2)"
            )

    def _lose_sight(self, error: Exception) -> None:
        if self.outlook == "unknown":
            return
        self._unknown_since = time.monotonic()
        self.outlook = "unknown"
        self._why = f"instance metadata answers no more ({error}): a notice would not be seen"

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
        self._deadline = min(self._deadline, time.monotonic() + left)
        if self._ending is None:
            error = PreemptionNotice(
                f"Spot notice: EC2 will {action} this instance", seconds=max(0.0, left)
            )
            self._ending = (error, time.monotonic() + max(0.0, left - FLUSH_SECONDS))
            self._ring()

    def _ring(self) -> None:
        """Have the main thread raise it: a signal, which also ends a system call that waits."""
        main = threading.main_thread().ident
        with self._lock:
            if self._noting or signal.SIGTERM not in self._handlers or main is None:
                return
            self._rings = True
            signal.pthread_kill(main, signal.SIGTERM)
