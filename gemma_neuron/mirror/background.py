"""A port mirrored while it is made: whatever gets its marker on disk is uploaded at once, beside the work.

In: a port's folder and a location. Out: its sets in the bucket, by `finish` at the latest. The mirror follows the
folder, not the stages: what has a marker exists. Trouble with the store is said once a minute and never stops the
work; what could not be mirrored by the end is an error then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from gemma_neuron.errors import AccessError, IntegrityError
from gemma_neuron.mirror.abandoned import abort_abandoned
from gemma_neuron.mirror.layout import (
    LOOSE_STEM,
    SetName,
    port_id,
    port_location,
    raw_location,
)
from gemma_neuron.mirror.owner import STALE_SECONDS, Owner, acquire
from gemma_neuron.mirror.push import Counts, Pusher
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.uploads import Uploads
from gemma_neuron.port import Port
from gemma_neuron.regular_files import FileState

WEIGHTS = "weights"
LOOK_SECONDS = 0.5
"""Between two looks at the folder: a few dozen names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """`uri`: s3://bucket/prefix. `grace`: seconds the end may wait for uploads. `stale`: see `mirror.owner`.

    `raw`: the checkpoint's weight files too. `contents`: see `push.Pusher`.
    """

    uri: str
    grace: float = 600.0
    bucket_owner: str = ""
    only_writer: bool = False
    raw: bool = True
    contents: bool = False
    stale: float = STALE_SECONDS


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
        self.refused: dict[str, FileState | None] = {}
        """Set → state of its marker, of sets whose files were found to be wrong on this disk."""
        self._looked_through: set[Store] = set()
        self._uploads = Uploads(self.owner, tell, self._note)
        make = partial(Pusher, port, self.store, raw, self.owner, contents=options.contents)
        aside = partial(make, check=self._uploads.give_way)
        self.sets, self.weights, self.raw = make(check=self._uploads.check), aside(), aside()
        self._uploads.add(self._push_sets, "mirror", LOOK_SECONDS)
        # tens of gigabytes that are cut again in minutes: never before a graph, which is megabytes and takes an hour
        self._uploads.add(self._push_weights, "mirror-weights", LOOK_SECONDS, urgent=False)
        if options.raw:
            self._uploads.add(self._push_raw, "mirror-raw", LOOK_SECONDS, urgent=False)

    def start(self) -> None:
        self._uploads.start()

    def finish(self, grace: float | None = None) -> None:
        """Wait for what is left, at most `grace` seconds, and give the lease back.

        Raises NotMirroredError when something is left, OwnerLostError when another has taken over.
        """
        seconds = self.options.grace if grace is None else grace
        self._uploads.finish(
            seconds, lambda: self.left() or ", ".join(self._wrong()), str(self.store.location)
        )
        self._note("mirrored", {})

    def left(self) -> str:
        """What is not in the bucket yet, in words; empty when all is."""
        wrong = self._wrong()
        names = [*self._waiting(self.sets), *self._waiting(self.weights)]
        sets = [name.key for name in names if name.key not in wrong]
        if self._has_news():
            sets.append("ledger")
        raw = [entry.name for _, entry in self.raw.raw_waiting()] if self.options.raw else []
        return ", ".join(sets + raw)

    def counts(self) -> Counts:
        """What this process sent, weight files of the checkpoint included."""
        pushers = self.sets, self.weights, self.raw
        return Counts(*map(sum, zip(*(astuple(pusher.counts) for pusher in pushers), strict=True)))

    def _waiting(self, pusher: Pusher) -> Iterator[SetName]:
        """The sets that are this pusher's: rank files have one of their own."""
        for name in pusher.waiting():
            if (name.folder == WEIGHTS) == (pusher is self.weights):
                yield name

    def _wrong(self) -> list[str]:
        """Sets that were refused and are still the same."""
        names = *self._waiting(self.sets), *self._waiting(self.weights)
        return [name.key for name in names if self._is_refused(name)]

    def _is_refused(self, name: SetName) -> bool:
        return name.key in self.refused and self.refused[name.key] == self.sets.state(name)

    def _push_sets(self) -> bool:
        """Send all that waits, then the records; whether there was nothing."""
        idle = self._push_all(self.sets)
        if self._has_news():
            # a ledger must not speak of a graph that is not there yet: the next machine would build it a second time
            self.sets.push_loose(lambda: all(map(self._is_refused, self._waiting(self.sets))))
            return False
        return idle

    def _push_weights(self) -> bool:
        self._abort_abandoned(self.store)
        return self._push_all(self.weights)

    def _push_all(self, pusher: Pusher) -> bool:
        """Send each that waits once, looking anew after each: a list made before would be old by then."""
        tried = set[str]()
        while True:
            names = self._waiting(pusher)
            left = (n for n in names if n.key not in tried and not self._is_refused(n))
            name = next(left, None)
            if name is None:
                return not tried
            tried.add(name.key)
            self._push(pusher, name)

    def _abort_abandoned(self, store: Store) -> None:
        """Once, before this thread begins uploads of its own there."""
        if store in self._looked_through:
            return
        try:
            abort_abandoned(store, self._may_delete)
        except AccessError as error:
            self.tell(f"warning: parts of abandoned uploads may lie in the bucket: {error.message}")
        self._looked_through.add(store)

    def _may_delete(self) -> None:
        self._uploads.give_way()
        self.owner.check()

    def _push(self, pusher: Pusher, name: SetName) -> None:
        state = pusher.state(name)
        try:
            pusher.push_set(name)
        except IntegrityError as error:
            if self._uploads.closing.is_set() or not self._is_changing(pusher, name, state):
                self.refused[name.key] = state
                self.tell(f"warning: {name.key} is not mirrored: {error.message}")

    @staticmethod
    def _is_changing(pusher: Pusher, name: SetName, state: FileState | None) -> bool:
        """A set that is being withdrawn and built again is wrong for a moment only."""
        time.sleep(LOOK_SECONDS)
        return pusher.state(name) != state

    def _has_news(self) -> bool:
        return self.sets.loose_state() != self.sets.sent.get(LOOSE_STEM)

    def _push_raw(self) -> bool:
        self._abort_abandoned(self.raw.raw)
        waiting = self.raw.raw_waiting()
        for path, entry in waiting:
            try:
                self.raw.push_raw(path, entry)
            except IntegrityError as error:
                self.tell(
                    f"warning: {entry.name} of the checkpoint is not mirrored: {error.message}"
                )
        return not waiting

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        counts = self.counts()
        own = {
            "event": event,
            "pid": os.getpid(),
            "generation": self.owner.generation,
            "uploaded": counts.uploaded,
            "bytes": counts.bytes,
        }
        self.port.append("events.jsonl", own | facts)
