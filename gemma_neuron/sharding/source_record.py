"""`source.json`: every weights file a port was cut from, with its size and digests, taken while ranks are written.

A file's entry stands there before the first rank is cut from it, first without digests: so a later run knows whether
ranks that are there came from the same bytes. One pass over each file, and none where the entry still holds. A file
whose every tensor is used needs no digest a tensor: put together again, with its header, they have the file's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from gemma_neuron.artifacts import CHUNK_BYTES, write_json_atomic
from gemma_neuron.errors import IntegrityError, PortMismatchError
from gemma_neuron.port import Port
from gemma_neuron.sharding.cuts import TensorSource
from gemma_neuron.sharding.piece_sizes import HOT_BYTES
from gemma_neuron.sharding.source_files import SourceFiles, anonymous_memory
from gemma_neuron.source_entries import (
    FILE_HEADER,
    FILE_TENSORS,
    SOURCE_RECORD,
    TENSOR_DIGESTS,
    SourceEntry,
    source_entries,
)


class SourceDigests:
    """Digests of whole files and of tensors in them, by a thread of its own while it is entered.

    `tensors`: our name → place. `again`: what an earlier run read is read again and compared. Entered,
    `ranks_are_of_these` says whether the ranks that are there are known to be cut from these bytes; where it says no,
    `begin` is to be called once those of other bytes are withdrawn. Raises PortMismatchError when a file's bytes are no
    longer those the port was begun with, IntegrityError when the record is wrong, and what SourceFiles raises.
    """

    def __init__(
        self,
        port: Port,
        files: SourceFiles,
        tensors: Mapping[str, TensorSource],
        seen_at: str,
        *,
        again: bool = False,
    ) -> None:
        self.port, self.files, self.seen_at, self.again = port, files, seen_at, again
        self.tensors: dict[Path, list[tuple[int, int, str]]] = {path: [] for path in files.states}
        for name, tensor in tensors.items():
            self.tensors[tensor.file].append((tensor.start, tensor.start + tensor.bytes, name))
        self.entries: dict[Path, SourceEntry] = {}
        self._known: tuple[SourceEntry, ...] = ()
        self._just_read: set[Path] = set()
        self.ranks_are_of_these = True
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "source-digests")
        self._work: Future[None] | None = None

    def __enter__(self) -> SourceDigests:
        self._known = source_entries(self.port) or ()
        known = {entry.name: entry for entry in self._known}
        for path in self.files.states:
            self.entries[path] = self._entry(path, known.get(path.name))
        if self.ranks_are_of_these:
            self.begin()
        return self

    def begin(self) -> None:
        """Record the files and read what has no digest yet: from now on a later run takes all ranks for theirs."""
        if tuple(self.entries.values()) != self._known:
            self._write()
        pending = [
            path
            for path, entry in self.entries.items()
            if entry.blake3 is None or (self.again and path not in self._just_read)
        ]
        if pending:
            self._work = self._pool.submit(self._digest_all, pending)

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def require_well(self) -> None:
        """Raise what the thread met, if it met something."""
        if self._work is not None and self._work.done():
            self._work.result()

    def finish(self) -> None:
        """Wait until every file has its digests on the disk."""
        if self._work is not None:
            self._work.result()

    def _entry(self, path: Path, known: SourceEntry | None) -> SourceEntry:
        state = self.files.states[path]
        fresh = SourceEntry(
            name=path.name,
            bytes=state.bytes,
            mtime_ns=state.mtime_ns,
            ctime_ns=state.ctime_ns,
            seen_at=self.seen_at,
        )
        if known is not None and known.stamp == fresh.stamp:
            return known
        if known is None or known.blake3 is None:
            self.ranks_are_of_these = False  # nobody can tell any more what they came from
            return fresh
        found = self._digests(path)
        self.files.require_unchanged([path])
        if found["blake3"] != known.blake3:
            raise PortMismatchError(
                f"{path.name} has other bytes than when {self.port.path} was begun: blake3 "
                f"{found['blake3'][:16]}, then {known.blake3[:16]}.",
                "Compile the changed checkpoint into a new folder, and with a mirror under another prefix.",
            )
        self._just_read.add(path)
        return _with_digests(fresh, found)

    def _digest_all(self, pending: Iterable[Path]) -> None:
        for path in pending:
            found, entry = self._digests(path), self.entries[path]
            if self._stopped.is_set():
                return
            self.files.require_unchanged([path])
            if entry.blake3 not in (None, found["blake3"]):
                raise self._wrong_digest(path, entry, found["blake3"])
            now = _with_digests(entry, found)
            if now != entry:
                self.entries[path] = now
                self._write()

    def _wrong_digest(self, path: Path, entry: SourceEntry, found: str) -> IntegrityError:
        record = self.port.path / SOURCE_RECORD
        return IntegrityError(
            f"{record} gives {path.name} the blake3 {str(entry.blake3)[:16]}; the file, of the same size and times as "
            f"recorded, has {found[:16]}.",
            f"Make sure of the checkpoint, then remove {record} and run the same command again: the ranks are compared "
            "with the checkpoint and the record is made anew.",
        )

    def _digests(self, path: Path) -> dict[str, Any]:
        """What the file's tensors can be checked against without it, in one pass over it."""
        size, spans = self.files.states[path].bytes, sorted(self.tensors[path])
        header = self._header(path, spans)
        hashed = [] if header else [(*span[:2], blake3()) for span in spans]
        whole = blake3()
        room = anonymous_memory(HOT_BYTES)
        first = 0
        for offset in range(0, size, HOT_BYTES):
            if self._stopped.is_set():
                break
            piece = room[: min(HOT_BYTES, size - offset)]
            self.files.read_into(path, piece, offset)
            if not offset % CHUNK_BYTES:
                self.files.read_ahead(path, offset + CHUNK_BYTES, CHUNK_BYTES)
            whole.update(piece)
            while first < len(hashed) and hashed[first][1] <= offset:
                first += 1
            for start, stop, hasher in hashed[first:]:
                if start >= offset + len(piece):
                    break
                hasher.update(piece[max(0, start - offset) : stop - offset])
        names = [name for _, _, name in spans]
        if header:
            held: dict[str, Any] = {FILE_HEADER: header.decode(), FILE_TENSORS: names}
        else:
            digests = (hasher.hexdigest() for _, _, hasher in hashed)
            held = {TENSOR_DIGESTS: dict(sorted(zip(names, digests, strict=True)))}
        return {"blake3": whole.hexdigest(), **held}

    def _header(self, path: Path, spans: Sequence[tuple[int, int, str]]) -> bytes:
        """The file's JSON header if it and the used tensors are all the file holds, else nothing."""
        ends = [8 + self._header_bytes(path), *(stop for _, stop, _ in spans)]
        if [start for start, _, _ in spans] != ends[:-1] or ends[-1] != self.files.states[
            path
        ].bytes:
            return b""
        room = bytearray(ends[0] - 8)
        self.files.read_into(path, memoryview(room), 8)
        return bytes(room)

    def _header_bytes(self, path: Path) -> int:
        room = bytearray(8)
        self.files.read_into(path, memoryview(room), 0)
        return int.from_bytes(room, "little")

    def _write(self) -> None:
        write_json_atomic(
            self.port.path / SOURCE_RECORD,
            {"files": [entry.to_json() for entry in self.entries.values()]},
        )


def _with_digests(entry: SourceEntry, found: dict[str, Any]) -> SourceEntry:
    about = entry.model_dump(include={"name", "bytes", "mtime_ns", "ctime_ns", "seen_at"})
    return SourceEntry.model_validate(about | found)
