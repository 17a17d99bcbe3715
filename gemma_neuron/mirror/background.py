"""A port mirrored while it is made: whatever gets its marker on disk is uploaded at once, beside the work.

In: a port's folder and a location. Out: its sets in the bucket, by `finish` at the latest. The mirror follows the
folder, not the stages: what has a marker exists. Trouble with the store is said once a minute and never stops the
work; what could not be mirrored by the end is an error then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from gemma_neuron.errors import IntegrityError
from gemma_neuron.mirror.layout import LOOSE_STEM, port_id, port_location, raw_location
from gemma_neuron.mirror.owner import STALE_SECONDS, Owner, acquire
from gemma_neuron.mirror.push import Counts, Pusher
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.uploads import Uploads
from gemma_neuron.port import Port

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
        self.refused: dict[str, str] = {}
        """Set → why it is not mirrored, of sets whose files are wrong on this disk."""
        self._uploads = Uploads(self.owner, tell, self._note)
        check = self._uploads.check
        make = partial(
            Pusher, port, self.store, raw, self.owner, contents=options.contents, check=check
        )
        self.sets, self.raw = make(), make()
        self._uploads.add(self._push_sets, "mirror", LOOK_SECONDS)
        if options.raw:
            self._uploads.add(self._push_raw, "mirror-raw", LOOK_SECONDS)

    def start(self) -> None:
        self._uploads.start()

    def finish(self, grace: float | None = None) -> None:
        """Wait for what is left, at most `grace` seconds, and give the lease back.

        Raises NotMirroredError when something is left, OwnerLostError when another has taken over.
        """
        seconds = self.options.grace if grace is None else grace
        self._uploads.finish(
            seconds, lambda: self.left() or ", ".join(self.refused), str(self.store.location)
        )
        self._note("mirrored", {})

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
        return Counts(*(sum(pair) for pair in zip(astuple(sets), astuple(raw), strict=True)))

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
                if self._uploads.closing.is_set() or not self._is_changing(name.key):
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
