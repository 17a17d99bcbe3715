"""One writer per port and prefix: an object taken by compare-and-swap, renewed, and taken over when stale.

In: a store. Out: an `Owner` with a generation that rises at each take-over; what it writes carries that number. Age
is by the store's own clock, since two machines' clocks need not agree. A lease that could not be renewed in time
counts as lost before another machine may take it: then nothing more is written.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from gemma_neuron.errors import GemmaNeuronError, MirrorInUseError, OwnerLostError
from gemma_neuron.mirror.store import MovedError, Store, Stored

OWNER_KEY = "owner.json"
STALE_SECONDS = 60.0
"""Age at which an owner that did not renew may be taken over."""
RENEW_SECONDS = 10.0
RELEASE_SECONDS = 15.0
"""What giving the lease back may take: boto3's own tries at a store that refuses take about ten."""
SAFETY_SECONDS = 10.0
"""An owner stops this long before it may be taken over: a request under way must not outlive its right."""


def clock() -> float:
    """Seconds of a clock that goes on while the machine sleeps, as the store's does: a hibernated instance wakes up
    with a lease that others have taken over."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class OwnerRecord(BaseModel):
    """What stands in owner.json. `token` names a process, `beat` counts its renewals."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    token: str
    generation: PositiveInt
    host: str
    pid: int
    beat: int = 0
    released: bool = False

    def data(self) -> bytes:
        return self.model_dump_json().encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, generation {self.generation}"


class Owner:
    """A held lease. `check` before each write that others must not see from a past owner."""

    def __init__(self, store: Store, record: OwnerRecord, etag: str, stale: float) -> None:
        self.store, self.record, self._etag, self._stale = store, record, etag, stale
        self._renewed = clock()
        self._lost: OwnerLostError | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mirror-owner", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        return self.record.generation

    def check(self) -> None:
        """Raise OwnerLostError unless the lease is held, renewed recently enough that nobody else may have it."""
        silent = clock() - self._renewed
        if self._lost is None and silent > max(self._stale - SAFETY_SECONDS, 0.75 * self._stale):
            self._renew()
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Say that this process writes no more, so that the next need not wait. Where the store is away or does not
        answer in RELEASE_SECONDS, the next waits until the lease is stale."""
        self._stop.set()
        ending = threading.Thread(target=self._give_back, name="mirror-release", daemon=True)
        ending.start()
        ending.join(RELEASE_SECONDS)

    def _give_back(self) -> None:
        self._thread.join()
        if self._lost is None:
            with suppress(GemmaNeuronError, OSError):
                self._write(self.record.model_copy(update={"released": True}))

    def _beat(self) -> None:
        while not self._stop.wait(min(RENEW_SECONDS, self._stale / 6)):
            if self._lost is not None:
                return
            self._renew()

    def _renew(self) -> None:
        record = self.record.model_copy(update={"beat": self.record.beat + 1})
        try:
            self._write(record)
        except (GemmaNeuronError, OSError):
            silent = clock() - self._renewed
            if silent > self._stale - SAFETY_SECONDS:
                self._lose(f"could not be renewed for {silent:.0f} s")

    def _write(self, record: OwnerRecord) -> None:
        with self._lock:
            asked = clock()
            try:
                self._etag = self.store.put_if(OWNER_KEY, record.data(), self._etag)
            except MovedError as moved:
                now = "gone" if moved.found is None else read_record(moved.found)
                self._lose(f"was taken over: it is now {now}")
                return
            self.record, self._renewed = record, asked

    def _lose(self, why: str) -> None:
        self._lost = OwnerLostError(
            f"The mirror {self.store.location} no longer belongs to this process: its lease {why}. Nothing more is "
            "written there; what was made here is on this machine's disk.",
            "Run the same command again: it goes on from both.",
        )


def read_record(found: Stored) -> OwnerRecord:
    """Raises MirrorInUseError when the object is none of ours."""
    try:
        return OwnerRecord.model_validate_json(found.data)
    except ValidationError as error:
        raise MirrorInUseError(
            f"{OWNER_KEY} in the mirror is no owner record: {error.errors()[0]['msg']}.",
            "Name another prefix.",
        ) from error


def acquire(
    store: Store,
    tell: Callable[[str], None],
    *,
    stale: float = STALE_SECONDS,
    only_writer: bool = False,
) -> Owner:
    """Take the lease, waiting for a stale one to age: by the store's clock, or while it is watched here, where the
    store does not tell the time.

    `only_writer`: the user vouches that no other machine writes; needed where the store ignores conditions and
    another was there before. Raises MirrorInUseError, AccessError or NetworkError.
    """
    conditional = store.honours_conditions()
    if not conditional:
        tell(
            f"warning: {store.location}: this store ignores conditions on writes, so one machine only may mirror here"
        )
    token, told, seen = uuid.uuid4().hex, False, ("", clock())
    while True:
        found = store.read(OWNER_KEY)
        if found is not None and found.etag != seen[0]:
            seen = found.etag, clock()
        before = None if found is None else read_record(found)
        if before is not None and not conditional:
            _refuse_second_machine(store, before, only_writer)
        elif before is not None and found is not None and not before.released:
            left = stale - max(found.age_seconds, clock() - seen[1])
            if left > 0:
                if not told:
                    tell(f"mirror: waiting up to {left:.0f} s, {before} may still be at work")
                told = True
                time.sleep(min(left + 1, stale / 30))
                _refuse_living(store, before)
                continue
        record = OwnerRecord(
            token=token,
            generation=1 if before is None else before.generation + 1,
            host=platform.node(),
            pid=os.getpid(),
        )
        try:
            etag = store.put_if(OWNER_KEY, record.data(), None if found is None else found.etag)
        except MovedError:
            continue  # another was faster: it is looked at like any other owner
        return Owner(store, record, etag, stale)


def _refuse_living(store: Store, before: OwnerRecord) -> None:
    """Raise MirrorInUseError when the owner that is waited for has renewed meanwhile."""
    found = store.read(OWNER_KEY)
    now = None if found is None else read_record(found)
    if (
        now is not None
        and not now.released
        and (now.token, now.beat) != (before.token, before.beat)
    ):
        raise MirrorInUseError(
            f"{store.location} is being written by {now}.",
            "Wait for it to end, or name another prefix.",
        )


def _refuse_second_machine(store: Store, before: OwnerRecord, only_writer: bool) -> None:
    if before.host != platform.node() and not before.released and not only_writer:
        raise MirrorInUseError(
            f"{store.location} was last written by {before}, which did not say it was done, and this store ignores "
            "conditions on writes: two writers would overwrite each other.",
            "When that machine is gone for certain: --mirror-only-writer.",
        )
