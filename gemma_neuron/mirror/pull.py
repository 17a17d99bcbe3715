"""A port's sets out of a bucket: each file checked against its manifest, and a set commits only when all are right.

In: a store and a folder. Out: committed sets. What is on disk already is not fetched again; a wrong, short or torn
object is refused, fetched once more, and then named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from blake3 import blake3

from gemma_neuron.artifacts import (
    PARTIAL_SUFFIX,
    FileEntry,
    digest_bytes,
    digest_file,
    remove,
    sync_folder,
    write_atomic,
)
from gemma_neuron.errors import IntegrityError, PortIncompleteError
from gemma_neuron.mirror.client import worth_retrying
from gemma_neuron.mirror.layout import (
    LOOSE_FILES,
    LOOSE_STEM,
    MARKER_SUFFIX,
    PUSH_AGAIN,
    SetName,
    blob_key,
    read_set,
)
from gemma_neuron.mirror.store import Store
from gemma_neuron.source_entries import SOURCE_RECORD, shared
from gemma_neuron.transfer import Progress, Transfer, disk_errors, require_room

FETCHES = 2
"""Of an object whose bytes are not what its manifest says: a proxy may have altered them on the way."""


@dataclass
class Pulled:
    """What a pull did. `bad`: sets that could not be had, with the reason."""

    total: int = 0
    downloaded: int = 0
    verified: int = 0
    bytes: int = 0
    sets: list[SetName] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)


def sets_in_bucket(store: Store) -> list[SetName]:
    """The sets with a marker, in the order a new machine needs them. Names no port has are passed over."""
    found = {SetName.of_marker(key) for key, _ in store.listing()}
    return sorted((name for name in found if name is not None), key=lambda name: name.rank)


@dataclass
class Puller:
    """Fetches sets into the port at `path`."""

    store: Store
    path: Path
    progress: Progress = lambda _: None
    counts: Pulled = field(default_factory=Pulled)

    def pull(self, names: list[SetName], tell: Callable[[str], None]) -> Pulled:
        """Fetch each set, going on after a bad one, which `tell` is told of."""
        with disk_errors(self.path, f"Pulling {self.store.location}"):
            for name in names:
                try:
                    self._pull_set(name)
                except IntegrityError as error:
                    self.counts.bad[name.key] = error.message
                    tell(f"warning: {name.key} is not taken from the mirror: {error.message}")
        return self.counts

    def pull_loose(self, names: list[str], tell: Callable[[str], None]) -> None:
        """Some of the port's loose files; the ones the bucket lacks stay missing."""
        name = SetName("", LOOSE_STEM)
        if self.store.size(name.key + MARKER_SUFFIX) is None:
            return
        try:
            for entry in read_set(self.store, name).manifest.files:
                if entry.name in names:
                    self._fetch_loose(entry)
        except IntegrityError as error:
            tell(f"warning: the port's records are not taken from the mirror: {error.message}")

    def _pull_set(self, name: SetName) -> None:
        found = read_set(self.store, name)
        manifest = found.manifest
        if not name.folder and not {e.name for e in manifest.files} <= set(LOOSE_FILES):
            raise IntegrityError(f"{self.store.location}/{name.key} names files no port has.")
        committed = name.on_disk(self.path)
        committed.folder.mkdir(parents=True, exist_ok=True)
        there = is_there if name.folder else _is_there_loose
        missing = [e for e in manifest.files if not there(committed.folder / e.name, e)]
        require_room(committed.folder, sum(entry.bytes for entry in missing), "The port")
        self.counts.total += len(manifest.files)
        self.counts.verified += len(manifest.files) - len(missing)
        for entry in missing:
            if name.folder:
                self.fetch(entry, committed.folder / entry.name)
            else:
                self._fetch_loose(entry)
        if name.folder:
            write_atomic(committed.manifest_path, found.local.encode())
            write_atomic(
                committed.marker_path, (digest_bytes(found.local.encode()) + "\n").encode()
            )
        self.counts.sets.append(name)

    def _fetch_loose(self, entry: FileEntry) -> None:
        """One of the port's loose files. Of `source.json` nothing is taken that speaks of this machine's files: they
        would be looked for, and sent to the mirror."""
        if entry.name != SOURCE_RECORD:
            self.fetch(entry, self.path / entry.name)
            return
        came = self.path / f"{SOURCE_RECORD}.pulled{PARTIAL_SUFFIX}"
        try:
            self.fetch(entry, came)
            write_atomic(self.path / SOURCE_RECORD, shared(came.read_bytes()))
        finally:
            came.unlink(missing_ok=True)

    def fetch(self, entry: FileEntry, target: Path) -> None:
        """One file by its content. Raises as `fetch_checked` does."""
        fetch_checked(self.store, blob_key(entry.blake3), entry, target, self.progress)
        self.counts.downloaded += 1
        self.counts.verified += 1
        self.counts.bytes += entry.bytes


def fetch_checked(
    store: Store, key: str, entry: FileEntry, target: Path, progress: Progress
) -> None:
    """One object to `target`, in parts, resumed after a death. Raises IntegrityError on another size, and on other
    bytes when they come twice: whoever has the right ones will then write over the object."""
    for left in reversed(range(FETCHES)):
        try:
            _fetch_once(store, key, entry, target, progress)
            return
        except IntegrityError:
            if not left:
                store.wrong.add(key)
                raise


def _fetch_once(store: Store, key: str, entry: FileEntry, target: Path, progress: Progress) -> None:
    size = store.size(key)
    if size != entry.bytes:
        raise IntegrityError(
            f"{store.location}/{key} ({entry.name}) has {'no object' if size is None else f'{size} bytes'}; the "
            f"manifest says {entry.bytes}.",
            PUSH_AGAIN,
        )
    growing = target.with_name(f"{target.name}.{entry.blake3[:16]}.partial")
    transfer = Transfer(size=entry.bytes, partial=growing, new_hash=blake3)
    with store.errors():
        transfer.run(partial(store.stream, key), worth_retrying, progress)
    found = digest_file(growing)
    if found != entry.blake3:
        transfer.discard()
        raise IntegrityError(
            f"{store.location}/{key} ({entry.name}) came with blake3 {found[:16]}…, not the manifest's "
            f"{entry.blake3[:16]}….",
            PUSH_AGAIN,
        )
    if target.is_dir():
        remove(target)
    transfer.finish(target)
    sync_folder(target.parent)


def require_port(store: Store, names: list[SetName]) -> None:
    if not any(not name.folder for name in names):
        raise PortIncompleteError(
            f"{store.location} holds no port ({len(names)} committed sets).",
            "Check the URI with `gemma-neuron mirror status`.",
        )


def _is_there_loose(path: Path, entry: FileEntry) -> bool:
    """As `is_there`; a `source.json` that knows more about this machine's files is the bucket's too."""
    if entry.name != SOURCE_RECORD or not path.is_file():
        return is_there(path, entry)
    try:
        return digest_bytes(shared(path.read_bytes())) == entry.blake3
    except IntegrityError:
        return False


def is_there(path: Path, entry: FileEntry) -> bool:
    """Whether a file, and no link to one, has the bytes that `entry` names."""
    return (
        path.is_file()
        and not path.is_symlink()
        and path.stat().st_size == entry.bytes
        and digest_file(path) == entry.blake3
    )
