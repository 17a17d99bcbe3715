"""A port's committed sets into a bucket: files first, manifest, marker last; each by the lease's generation.

In: a port and a held lease. Out: objects. A set that is there already is not sent again. A set that another owner of
a later generation wrote is left alone, and the lease counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gemma_neuron.artifacts import FileEntry, Manifest, digest_bytes
from gemma_neuron.errors import IntegrityError
from gemma_neuron.mirror.check import digest_of
from gemma_neuron.mirror.guarded import Guarded
from gemma_neuron.mirror.layout import (
    LOOSE_FILES,
    LOOSE_STEM,
    SETTLED_FILES,
    SetName,
    blob_key,
    sets_on_disk,
)
from gemma_neuron.mirror.owner import Owner
from gemma_neuron.mirror.parts import send
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import Port
from gemma_neuron.regular_files import FileState
from gemma_neuron.source_entries import SOURCE_RECORD, shared, source_entries
from gemma_neuron.transfer import Progress


@dataclass
class Counts:
    """What a push did."""

    total: int = 0
    uploaded: int = 0
    bytes: int = 0
    verified: int = 0
    """Objects that were there and whose contents were read."""


@dataclass
class Pusher:
    """Sends sets of one port. `raw`: where weight files of checkpoints go."""

    port: Port
    store: Store
    raw: Store
    owner: Owner
    contents: bool = False
    """What is there counts only when its bytes are right, and is written over when they are not."""
    progress: Progress = lambda _: None
    counts: Counts = field(default_factory=Counts)
    sent: dict[str, object] = field(default_factory=dict)
    """Set or raw file → state of what the bucket has of it, as far as this process knows."""
    check: Callable[[], None] = lambda: None
    """Raises when nothing more is to be sent."""

    def waiting(self) -> Iterator[SetName]:
        """Sets on disk that this process did not see in the bucket yet."""
        for name in sets_on_disk(self.port):
            marker = name.on_disk(self.port.path).marker_path
            if self.sent.get(name.key) != _text(marker):
                yield name

    def state(self, name: SetName) -> FileState | None:
        """Of a set's marker; another once the set was made anew, be it of the same bytes."""
        try:
            return FileState.of(name.on_disk(self.port.path).marker_path)
        except OSError:
            return None

    def push_set(self, name: SetName) -> None:
        """Send one committed set. Raises IntegrityError when its files are no longer what was committed."""
        committed = name.on_disk(self.port.path)
        marker = _text(committed.marker_path)
        manifest = committed.manifest()
        if manifest is None:
            return  # withdrawn since it was listed
        for entry in manifest.files:
            self._push_blob(entry, committed.folder / entry.name)
        self._guarded.commit(name, committed.manifest_path.read_text(encoding="utf-8"))
        self.sent[name.key] = marker

    def loose_state(self) -> dict[str, FileState]:
        """Changes when a loose file worth mirroring does. It is asked for twice a second: nothing is read."""
        files = [self.port.path / name for name in SETTLED_FILES]
        return {file.name: FileState.of(file) for file in files if file.is_file()}

    def push_loose(self, may_go: Callable[[], bool] = lambda: True) -> None:
        """Send the port's loose files as they are now, as one set. `may_go`: asked once they are read."""
        state, entries, pieces = self.loose_state(), [], {}
        for name in LOOSE_FILES:
            path = self.port.path / name
            if path.is_file():
                data = path.read_bytes()
                pieces[name] = shared(data) if name == SOURCE_RECORD else data
                digest = digest_bytes(pieces[name])
                entries.append(FileEntry(name=name, bytes=len(pieces[name]), blake3=digest))
        if not may_go():
            return
        for entry in entries:
            self._put_small(entry, pieces[entry.name])
        text = Manifest(files=tuple(entries)).model_dump_json(indent=1)
        self._guarded.commit(SetName("", LOOSE_STEM), text)
        self.sent[LOOSE_STEM] = state

    def raw_waiting(self) -> list[tuple[Path, FileEntry]]:
        """Weight files of the checkpoint that are at hand and not known to be in the bucket."""
        found = []
        for path, entry in raw_files(self.port):
            if entry.blake3 not in self.sent and path.is_file():
                found.append((path, entry))
        return found

    def push_raw(self, path: Path, entry: FileEntry) -> None:
        """Send one weight file. Raises IntegrityError when `path` has other bytes by now; it is not asked for again."""
        self.counts.total += 1
        try:
            if not self._is_there(self.raw, entry.blake3, entry):
                self._put_file(self.raw, entry.blake3, path, entry)
        except IntegrityError:
            self.sent[entry.blake3] = ""
            raise
        self.sent[entry.blake3] = entry.name

    def _push_blob(self, entry: FileEntry, path: Path) -> None:
        self.counts.total += 1
        key = blob_key(entry.blake3)
        if not self._is_there(self.store, key, entry):
            self._put_file(self.store, key, path, entry)

    def _is_there(self, store: Store, key: str, entry: FileEntry) -> bool:
        """Whether the bucket has these bytes; going by their number, unless the contents are to be read."""
        if not store.has(key, entry.bytes) or not self.contents:
            return store.has(key, entry.bytes)
        self.counts.verified += 1
        return digest_of(store, key, entry.bytes, lambda _: self.check()) == entry.blake3

    def _put_file(self, store: Store, key: str, path: Path, entry: FileEntry) -> None:
        send(store, key, path, entry, self.progress, self._guarded.may_write)
        self.counts.uploaded += 1
        self.counts.bytes += entry.bytes

    def _put_small(self, entry: FileEntry, data: bytes) -> None:
        self.counts.total += 1
        key = blob_key(entry.blake3)
        if not self._is_there(self.store, key, entry):
            self._guarded.may_write()
            self.store.put(key, data)
            self.store.wrong.discard(key)
            self.counts.uploaded += 1
            self.counts.bytes += len(data)

    @property
    def _guarded(self) -> Guarded:
        return Guarded(self.store, self.owner, self.check)


def raw_files(port: Port) -> list[tuple[Path, FileEntry]]:
    """The checkpoint's weight files by source.json: where they were last seen on this machine, and their digests.

    Without those that `shard` is still to digest. The record may be a stranger's: a file is not those bytes until it
    was read.
    """
    return [
        (Path(e.seen_at) / e.name, FileEntry(name=e.name, bytes=e.bytes, blake3=e.blake3))
        for e in source_entries(port) or ()
        if e.blake3 is not None and Path(e.seen_at).is_absolute()
    ]


def _text(marker: Path) -> str:
    try:
        return marker.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
