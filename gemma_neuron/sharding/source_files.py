"""The checkpoint's files, open for a whole run: read into given memory, and watched for change.

Files are read, not mapped: of a mapped file that is cut short the first notice is SIGBUS, of a read one an error that
can be explained.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from gemma_neuron.errors import EnvironmentProblem, SourceChangedError
from gemma_neuron.sharding.cuts import Cut

SHORT_STRIDE = 16 * 1024
"""Rows up to this many bytes are read whole and picked apart in memory; of longer ones only the run is read. A read
costs about as much as copying this much."""
SCRATCH_BYTES = 2 * 1024 * 1024
READ_AHEAD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file's bytes do."""

    bytes: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


class SourceFiles:
    """Open files by path. Every method raises SourceChangedError or EnvironmentProblem (a read error)."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.states: dict[Path, FileState] = {}
        self._handles: dict[Path, int] = {}
        self._scratch = memoryview(anonymous_memory(SCRATCH_BYTES))
        self._ahead = (Path(), 0)
        try:
            for path in sorted(set(paths)):
                self.states[path] = FileState.of(path)
                self._handles[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise _unreadable(error.filename or "a weights file", 0, error) from error

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def require_unchanged(self, paths: Iterable[Path] | None = None) -> None:
        """Size, time and identity of the files (of all of them by default) are what they were when opened."""
        for path in self.states if paths is None else paths:
            try:
                found = FileState.of(path)
            except OSError as error:
                raise _changed(path, f"it cannot be found any more ({error.strerror})") from error
            if found != self.states[path]:
                raise _changed(path, _difference(self.states[path], found))

    def read_into(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes at `offset`."""
        handle, done = self._handles[path], 0
        while done < len(view):
            try:
                count = os.preadv(handle, [view[done:]], offset + done)
            except OSError as error:
                raise _unreadable(path, offset + done, error) from error
            if not count:
                raise _changed(path, f"it ended at byte {offset + done:,} while it was read")
            done += count

    def read_ahead(self, path: Path, offset: int, count: int) -> None:
        """Have the system fetch what is read next: many small reads far apart look like no order to it."""
        os.posix_fadvise(self._handles[path], offset, count, os.POSIX_FADV_WILLNEED)

    def read_cut(self, path: Path, cut: Cut, position: int, view: memoryview) -> None:
        """Fill `view` with the cut's bytes from its byte `position` on, as if its runs were one text."""
        while len(view):
            index, inside = divmod(position, cut.run)
            rows = len(view) // cut.run
            start = cut.start + index * cut.stride
            if cut.count == 1 or inside or not rows:
                count = min(cut.run - inside, len(view))
                self.read_into(path, view[:count], start + inside)
            elif cut.stride <= SHORT_STRIDE:
                count = self._pick(path, cut, index, rows, view)
            else:
                rows = min(rows, max(1, READ_AHEAD_BYTES // cut.stride))
                self.read_ahead(path, start, (rows - 1) * cut.stride + cut.run)
                for row in range(rows):
                    piece = view[row * cut.run : (row + 1) * cut.run]
                    self.read_into(path, piece, start + row * cut.stride)
                count = rows * cut.run
            view, position = view[count:], position + count

    def _pick(self, path: Path, cut: Cut, index: int, rows: int, view: memoryview) -> int:
        """Runs `index` and after out of whole rows, as many as the scratch memory takes; bytes filled."""
        rows = min(rows, SCRATCH_BYTES // cut.stride)
        span = (rows - 1) * cut.stride + cut.run
        self.read_into(path, self._scratch[:span], cut.start + index * cut.stride)
        held = np.frombuffer(self._scratch, np.uint8)
        runs = np.lib.stride_tricks.as_strided(held, (rows, cut.run), (cut.stride, 1))
        count = rows * cut.run
        np.copyto(np.frombuffer(view[:count], np.uint8).reshape(rows, cut.run), runs)
        return count


def anonymous_memory(count: int) -> mmap.mmap:
    """Page-aligned memory of this process alone, as unbuffered writing needs it."""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _difference(before: FileState, now: FileState) -> str:
    if before.bytes != now.bytes:
        return f"it had {before.bytes:,} bytes and has {now.bytes:,}"
    if (before.inode, before.device) != (now.inode, now.device):
        return "another file has taken its place"
    return "it was written to"


def _changed(path: Path, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{path} changed while ranks were cut from it: {how}.",
        "Restore the checkpoint and run the same command again; committed ranks stay.",
    )


def _unreadable(path: Path | str, offset: int, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"Reading {path} at byte {offset:,} failed: {error.strerror or error}.",
        "Check the disk or fetch the checkpoint again, then run the same command; committed ranks stay.",
    )
