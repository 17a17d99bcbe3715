"""Who may write to a mirror: one process at a time, whatever stops, sleeps or wakes late."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.errors import GemmaNeuronError, MirrorInUseError, OwnerLostError
from gemma_neuron.mirror import owner as leases
from gemma_neuron.mirror import store as stores
from gemma_neuron.mirror.layout import port_id, port_location, raw_location
from gemma_neuron.mirror.owner import Owner, OwnerRecord, acquire
from gemma_neuron.mirror.push import Pusher
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.store import age as age_of
from gemma_neuron.port import Port

BUCKET = "owners"
STALE = 6.0


def nobody(_: str) -> None: ...


def lease(uri: str, **more: Any) -> Owner:
    return acquire(Store(port_location(uri, "p")), nobody, stale=STALE, **more)


def asleep(owner: Owner) -> Owner:
    """The process is stopped: it renews no more, and does not know."""
    owner._stop.set()
    owner._thread.join()
    owner._stop.clear()
    return owner


def at_once(count: int, act: Callable[[], object]) -> list[object]:
    """What `count` threads that begin together get or raise."""
    gate, found = threading.Barrier(count), list[object]()

    def run() -> None:
        gate.wait()
        try:
            found.append(act())
        except GemmaNeuronError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("round_", range(3))
def test_of_two_that_start_at_once_one_writes(uri: str, round_: int) -> None:
    found = at_once(2, lambda: lease(f"{uri}-{round_}"))
    owners = [one for one in found if isinstance(one, Owner)]
    assert len(owners) == 1 and owners[0].generation == 1
    assert sum(isinstance(one, MirrorInUseError) for one in found) == 1
    owners[0].check()
    owners[0].release()


def test_a_stale_lease_is_taken_over_once(uri: str) -> None:
    first = asleep(lease(uri))
    found = at_once(3, lambda: lease(uri))
    owners = [one for one in found if isinstance(one, Owner)]
    assert len(owners) == 1 and owners[0].generation == 2
    with pytest.raises(OwnerLostError, match="taken over"):
        first.check()
    owners[0].release()


def test_a_released_lease_is_taken_at_once_and_counts_on(uri: str) -> None:
    for generation in (1, 2, 3):
        started = time.monotonic()
        owner = acquire(Store(port_location(uri, "p")), nobody, stale=600.0)
        assert owner.generation == generation and time.monotonic() - started < 60
        owner.release()


def test_a_lease_that_cannot_be_renewed_is_given_up_before_another_may_take_it(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SAFETY_SECONDS", 1.0)
    owner = lease(uri)
    owner.check()
    monkeypatch.setattr(owner.store, "put_if", _cut)
    lost = None
    started = time.monotonic()
    while lost is None and time.monotonic() - started < 2 * STALE:
        time.sleep(0.05)
        lost = owner._lost
    assert lost is not None and "could not be renewed" in lost.message
    assert time.monotonic() - started < STALE
    with pytest.raises(OwnerLostError):
        owner.check()


def _cut(*_: object) -> str:
    raise OSError("network is unreachable")


def pusher(port: Path, uri: str, owner: Owner) -> Pusher:
    made = Port(port)
    store = Store(port_location(uri, port_id(made.record.digest)))
    return Pusher(made, store, Store(raw_location(uri)), owner)


def test_what_a_later_owner_wrote_is_not_overwritten(uri: str, port: Path, tmp_path: Path) -> None:
    """The first is stopped past its age, the second commits, the first wakes in the middle of its push."""
    mine, theirs = (Path(shutil.copytree(port, tmp_path / name)) for name in ("mine", "theirs"))
    first = asleep(lease(uri))
    late = pusher(mine, uri, first)
    second = lease(uri)
    # the second's files differ: a compiler's output need not be the same twice
    marked = Port(theirs).rank_set(0)
    manifest = marked.manifest()
    assert manifest is not None
    marked.commit_entries(manifest.files, manifest.facts | {"by": "second"})
    there = pusher(theirs, uri, second)
    for name in there.waiting():
        there.push_set(name)
    before = _objects(there.store)

    first.check = lambda: None  # type: ignore[method-assign]  # it woke between its check and its write
    rank, *_ = [name for name in late.waiting() if name.folder == "weights"]
    with pytest.raises(OwnerLostError, match="later owner"):
        late.push_set(rank)
    assert _objects(there.store) == before
    second.release()


def _objects(store: Store) -> dict[str, str]:
    return {key: store.client.head_object(**store.at(key))["ETag"] for key, _ in store.listing()}


def test_a_lease_does_not_outlast_the_machines_sleep(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hibernated, it comes back with the monotonic clock where it was; the store's went on."""
    owner = asleep(lease(uri))
    owner.check()
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 10 * STALE)
    monkeypatch.setattr(owner.store, "put_if", _cut)
    with pytest.raises(OwnerLostError, match="could not be renewed"):
        owner.check()


def test_a_crashed_owners_lease_ages_where_the_store_tells_no_time(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep(lease(uri))
    monkeypatch.setattr(stores, "age", lambda said, modified: 0.0)
    started = time.monotonic()
    owner = lease(uri)
    assert owner.generation == 2 and time.monotonic() - started >= STALE
    owner.release()


class _Heedless(Store):
    """A store that takes conditions and heeds none, as several do."""

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        return self.put(key, data)


def test_where_conditions_are_ignored_a_second_machine_is_refused(uri: str) -> None:
    store, said = _Heedless(port_location(uri, "p")), list[str]()
    theirs = OwnerRecord(token="t", generation=3, host="another", pid=1)
    store.put(leases.OWNER_KEY, theirs.data())
    with pytest.raises(MirrorInUseError, match="another, generation 3"):
        acquire(store, said.append, stale=STALE)
    assert "one machine only" in said[0]
    owner = acquire(store, said.append, stale=STALE, only_writer=True)
    assert owner.generation == 4
    owner.release()


def test_conditions_are_found_to_be_heeded(uri: str) -> None:
    store = Store(port_location(uri, "probe"))
    assert store.honours_conditions()
    assert not list(store.listing())
    assert not _Heedless(port_location(uri, "probe")).honours_conditions()


@pytest.mark.parametrize(
    ("said", "age"),
    [
        ("Mon, 30 Nov 2026 12:00:05 GMT", 5.0),
        ("Mon, 30 Nov 2026 12:00:05 GMT, Mon, 30 Nov 2026 12:00:05 GMT", 5.0),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0.0),
        ("yesterday", 0.0),
        ("", 0.0),
    ],
)
def test_an_age_is_by_the_stores_clock_if_it_has_one(said: str, age: float) -> None:
    assert age_of(said, datetime(2026, 11, 30, 12, tzinfo=UTC)) == age


def test_an_owner_object_of_somebody_else_is_left_alone(uri: str) -> None:
    store = Store(port_location(uri, "p"))
    store.put(leases.OWNER_KEY, b"a file of theirs")
    with pytest.raises(MirrorInUseError, match="no owner record"):
        lease(uri)
    found = store.read(leases.OWNER_KEY)
    assert found is not None and found.data == b"a file of theirs"
