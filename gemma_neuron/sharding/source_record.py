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
from types import TracebackType
from typing import Any

from blake3 import blake3

from gemma_neuron.artifacts import CHUNK_BYTES, write_json_atomic
from gemma_neuron.errors import PortMismatchError
from gemma_neuron.port import Port
from gemma_neuron.reassembly import FILE_HEADER, FILE_TENSORS, SOURCE_RECORD, TENSOR_DIGESTS
from gemma_neuron.sharding.cuts import TensorSource
from gemma_neuron.sharding.source_files import SourceFiles, anonymous_memory

Entry = dict[str, Any]


class SourceDigests:
    """Digests of whole files and of tensors in them, by a thread of its own while it is entered.

    `tensors`: our name → place. Entered, `ranks_are_of_these` says whether the ranks that are there are known to be
    cut from these bytes. Raises PortMismatchError when a file's bytes are no longer those the port was begun with, and
    what SourceFiles raises.
    """

    def __init__(
        self, port: Port, files: SourceFiles, tensors: Mapping[str, TensorSource], seen_at: str
    ) -> None:
        self.port, self.files, self.seen_at = port, files, seen_at
        self.tensors: dict[Path, list[tuple[int, int, str]]] = {path: [] for path in files.states}
        for name, tensor in tensors.items():
            self.tensors[tensor.file].append((tensor.start, tensor.start + tensor.bytes, name))
        self.entries: dict[Path, Entry] = {}
        self.ranks_are_of_these = True
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "source-digests")
        self._work: Future[None] | None = None

    def __enter__(self) -> SourceDigests:
        known = {
            e["name"]: e for e in (self.port.read_json(SOURCE_RECORD) or {"files": []})["files"]
        }
        for path in self.files.states:
            self.entries[path] = self._entry(path, known.get(path.name))
        if list(self.entries.values()) != list(known.values()):
            self._write()
        pending = [path for path, entry in self.entries.items() if "blake3" not in entry]
        if pending:
            self._work = self._pool.submit(self._digest_all, pending)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def _entry(self, path: Path, known: Entry | None) -> Entry:
        state = self.files.states[path]
        fresh = {"name": path.name, "bytes": state.bytes, "mtime_ns": state.mtime_ns}
        if known is None:
            return {**fresh, "seen_at": self.seen_at}
        if all(known.get(key) == value for key, value in fresh.items()):
            return known
        if (
            "blake3" not in known
        ):  # nobody can tell any more what the ranks that are there came from
            self.ranks_are_of_these = False
            return {**fresh, "seen_at": self.seen_at}
        return {**fresh, "seen_at": self.seen_at, **self._same_digests(path, known)}

    def _same_digests(self, path: Path, known: Entry) -> Entry:
        found = self._digests(path)
        if found["blake3"] != known["blake3"]:
            raise PortMismatchError(
                f"{path.name} has other bytes than when {self.port.path} was begun: blake3 "
                f"{found['blake3'][:16]}, then {known['blake3'][:16]}.",
                "Compile the changed checkpoint into a new folder.",
            )
        return found

    def _digest_all(self, pending: Iterable[Path]) -> None:
        for path in pending:
            digests = self._digests(path)
            if self._stopped.is_set():
                return
            self.files.require_unchanged([path])
            self.entries[path] = {**self.entries[path], **digests}
            self._write()

    def _digests(self, path: Path) -> Entry:
        """What the file's tensors can be checked against without it, in one pass over it."""
        size, spans = self.files.states[path].bytes, sorted(self.tensors[path])
        header = self._header(path, spans)
        hashed = [] if header else [(*span[:2], blake3(max_threads=blake3.AUTO)) for span in spans]
        whole = blake3(max_threads=blake3.AUTO)
        room = memoryview(anonymous_memory(CHUNK_BYTES))
        first = 0
        for offset in range(0, size, CHUNK_BYTES):
            if self._stopped.is_set():
                break
            piece = room[: min(CHUNK_BYTES, size - offset)]
            self.files.read_into(path, piece, offset)
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
            held: Entry = {FILE_HEADER: header.decode(), FILE_TENSORS: names}
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
        write_json_atomic(self.port.path / SOURCE_RECORD, {"files": list(self.entries.values())})
