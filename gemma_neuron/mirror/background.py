"""A port mirrored while it is made: whatever gets its marker on disk is uploaded at once, beside the work.

In: a port's folder and a location. Out: its sets in the bucket, by `finish` at the latest. The mirror follows the
folder, not the stages: what has a marker exists. Trouble with the store is said once a minute and never stops the
work; what could not be mirrored by the end is an error then.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemma_neuron.errors import GemmaNeuronError, IntegrityError, NotMirroredError, OwnerLostError
from gemma_neuron.mirror.layout import LOOSE_STEM, port_id, port_location, raw_location
from gemma_neuron.mirror.owner import STALE_SECONDS, Owner, acquire
from gemma_neuron.mirror.parts import step_back
from gemma_neuron.mirror.push import Counts, Pusher
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import Port

LOOK_SECONDS = 0.5
"""Between two looks at the folder: a few dozen names."""
SAY_SECONDS = 60.0
LONGEST_WAIT = 30.0
"""Between two tries while the store is in trouble."""
RELEASE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """`uri`: s3://bucket/prefix. `grace`: seconds the end may wait for uploads. `stale`: see `mirror.owner`."""

    uri: str
    grace: float = 600.0
    bucket_owner: str = ""
    only_writer: bool = False
    raw: bool = True
    stale: float = STALE_SECONDS


class _StoppedError(Exception):
    """The time for uploads is over."""


class Mirror:
    """Uploads a port's sets as they are committed. `tell` gets lines for the user."""

    def __init__(self, port: Port, options: MirrorOptions, tell: Callable[[str], None]) -> None:
        """Take the lease. Raises what `acquire` raises."""
        self.port, self.options, self.tell = port, options, tell
        identity = port_id(port.record.digest)
        self.store = Store(port_location(options.uri, identity), options.bucket_owner)
        raw = Store(raw_location(options.uri), options.bucket_owner)
        self.owner: Owner = acquire(
            self.store, tell, stale=options.stale, only_writer=options.only_writer
        )
        self._stop, self._closing = threading.Event(), threading.Event()
        self._said, self._trouble = -SAY_SECONDS, ""
        self.lost: OwnerLostError | None = None
        self.refused: dict[str, str] = {}
        """Set → why it is not mirrored, of sets whose files are wrong on this disk."""
        self.sets = Pusher(port, self.store, raw, self.owner, check=self._check)
        self.raw = Pusher(port, self.store, raw, self.owner, check=self._check)
        self._threads = [threading.Thread(target=self._run, args=(self._push_sets,), name="mirror")]
        if options.raw:
            self._threads.append(
                threading.Thread(target=self._run, args=(self._push_raw,), name="mirror-raw")
            )
        for thread in self._threads:
            thread.daemon = True

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, grace: float | None = None) -> None:
        """Wait for what is left, at most `grace` seconds, and give the lease back.

        Raises NotMirroredError when something is left, OwnerLostError when another has taken over.
        """
        self._closing.set()
        deadline = time.monotonic() + (self.options.grace if grace is None else grace)
        said = time.monotonic()
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(LOOK_SECONDS)
                if thread.is_alive() and time.monotonic() - said > LOOK_SECONDS * 10:
                    said = time.monotonic()
                    self.tell(f"mirror: {self.left()} left")
        self._stop.set()
        for thread in self._threads:
            thread.join(RELEASE_SECONDS)
        left = self.left()
        self.owner.release()
        if self.lost is not None:
            raise self.lost
        if left or self.refused:
            raise NotMirroredError(
                f"{left or ', '.join(self.refused)} not mirrored to {self.store.location}"
                f"{': ' + self._trouble if self._trouble else '.'}",
                "Run the same command again: it uploads what is missing.",
            )
        self.port.append("events.jsonl", self._event("mirrored"))

    def left(self) -> str:
        """What is not in the bucket yet, in words; empty when all is."""
        sets = [name.key for name in self.sets.waiting() if name.key not in self.refused]
        if self.sets.loose_state() != self.sets.sent.get(LOOSE_STEM):
            sets.append("ledger")
        raw = [entry.name for _, entry in self.raw.raw_waiting()] if self.options.raw else []
        return ", ".join(sets + raw)

    def counts(self) -> Counts:
        """What this process sent, weight files of the checkpoint included."""
        sets, raw = self.sets.counts, self.raw.counts
        return Counts(sets.total + raw.total, sets.uploaded + raw.uploaded, sets.bytes + raw.bytes)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _run(self, push: Callable[[], bool]) -> None:
        """Push until the end is near and nothing is left; wait longer after each trouble in a row."""
        step_back()
        troubles = 0
        while not self._stop.is_set():
            try:
                idle = push()
                troubles = 0
            except _StoppedError:
                return
            except OwnerLostError as error:
                self.lost = error
                self.tell(f"warning: {error.message}")
                self.port.append("events.jsonl", self._event("owner_lost"))
                return
            except GemmaNeuronError as error:
                troubles += 1
                self._say(error)
                self._stop.wait(min(LONGEST_WAIT, 2.0**troubles) * random.uniform(0.5, 1.0))
                continue
            if idle and self._closing.is_set():
                return
            if idle:
                self._closing.wait(LOOK_SECONDS)

    def _push_sets(self) -> bool:
        """Send all that waits; whether there was nothing."""
        idle = True
        for name in list(self.sets.waiting()):
            if name.key in self.refused:
                continue
            idle = False
            try:
                self.sets.push_set(name)
            except IntegrityError as error:
                if self._closing.is_set() or not self._is_changing(name.key):
                    self.refused[name.key] = error.message
                    self.tell(f"warning: {name.key} is not mirrored: {error.message}")
        if self.sets.loose_state() != self.sets.sent.get(LOOSE_STEM):
            idle = False
            self.sets.push_loose()
        return idle

    def _is_changing(self, key: str) -> bool:
        """A set that is being withdrawn and built again is wrong for a moment only."""
        time.sleep(LOOK_SECONDS)
        return key not in {name.key for name in self.sets.waiting()}

    def _push_raw(self) -> bool:
        waiting = self.raw.raw_waiting()
        for path, entry in waiting:
            self.raw.push_raw(path, entry)
        return not waiting

    def _say(self, error: GemmaNeuronError) -> None:
        self._trouble = error.message
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            self.tell(f"warning: the mirror is behind, trying on: {error.message}")
            self.port.append("events.jsonl", self._event("mirror_stalled") | {"why": error.message})

    def _event(self, name: str) -> dict[str, Any]:
        counts = self.counts()
        return {
            "event": name,
            "pid": os.getpid(),
            "generation": self.owner.generation,
            "uploaded": counts.uploaded,
            "bytes": counts.bytes,
        }
