"""A set in a bucket while it is replaced: whoever reads it finds the one before or the one after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gemma_neuron.artifacts import Manifest, digest_bytes
from gemma_neuron.mirror.guarded import Guarded
from gemma_neuron.mirror.layout import (
    MirroredManifest,
    MirroredMarker,
    SetName,
    port_location,
    read_set,
)
from gemma_neuron.mirror.owner import Owner, acquire
from gemma_neuron.mirror.store import Store, Stored

BUCKET = "sets"
RANK = SetName("weights", "rank-00")


@pytest.fixture
def owner(uri: str) -> Iterator[Owner]:
    held = acquire(Store(port_location(uri, "p")), lambda _: None)
    yield held
    held.release()


def guarded(uri: str, owner: Owner) -> Guarded:
    return Guarded(Store(port_location(uri, "p")), owner)


def text_of(number: int) -> str:
    return Manifest(files=(), facts={"number": number}).model_dump_json()


def test_a_set_is_there_whole_while_it_is_replaced(
    uri: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer dies between any two requests."""
    writing = guarded(uri, owner)
    writing.commit(RANK, text_of(1))

    class DiedError(Exception):
        pass

    def die(*_: object) -> None:
        raise DiedError

    reader = Store(port_location(uri, "p"))
    for number, step, seen in ((2, "put", 1), (3, "put_if", 1), (4, "delete", 4)):
        with monkeypatch.context() as patch, pytest.raises(DiedError):
            patch.setattr(writing.store, step, die)
            writing.commit(RANK, text_of(number))
        assert read_set(reader, RANK).local == text_of(seen)
    writing.commit(RANK, text_of(5))
    assert read_set(reader, RANK).local == text_of(5)


def test_a_set_that_is_replaced_while_it_is_read_is_read_again(
    uri: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = guarded(uri, owner)
    writing.commit(RANK, text_of(1))
    reader = Store(port_location(uri, "p"))
    read, numbers = reader.read, iter((2, 3))

    def replaced_after(key: str) -> Stored | None:
        found = read(key)
        if key.endswith(".committed") and (number := next(numbers, 0)):
            writing.commit(RANK, text_of(number))
        return found

    monkeypatch.setattr(reader, "read", replaced_after)
    assert read_set(reader, RANK).local == text_of(3)
    names = [key for key, _ in reader.listing() if key.startswith("weights/")]
    assert len(names) == 2, names  # earlier manifests are gone


def test_a_byte_altered_on_the_way_does_not_lose_a_set(
    uri: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded(uri, owner).commit(RANK, text_of(1))
    reader = Store(port_location(uri, "p"))
    read, flips = reader.read, iter((60, 90))

    def flipped(key: str) -> Stored | None:
        found, at = read(key), next(flips, 0)
        if found is None or not at:
            return found
        at %= len(found.data)
        data = found.data[:at] + bytes([found.data[at] ^ 1]) + found.data[at + 1 :]
        return replace(found, data=data)

    monkeypatch.setattr(reader, "read", flipped)
    assert read_set(reader, RANK).local == text_of(1)


def test_a_set_of_an_earlier_versions_mirror_is_read_and_replaced(uri: str, owner: Owner) -> None:
    store = Store(port_location(uri, "p"))
    manifest = MirroredManifest(generation=1, local=text_of(1)).data()
    marker = MirroredMarker(generation=1, manifest=digest_bytes(manifest)).data()
    store.put("weights/rank-00.manifest.json", manifest)
    store.put("weights/rank-00.committed", marker)
    assert read_set(store, RANK).local == text_of(1)
    guarded(uri, owner).commit(RANK, text_of(2))
    assert read_set(store, RANK).local == text_of(2)
    assert store.size("weights/rank-00.manifest.json") is None
