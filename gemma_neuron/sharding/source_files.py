"""The checkpoint's files, open for a whole run: read into given memory, and watched for change.

Files are read, not mapped: of a mapped file that is cut short the first notice is SIGBUS, of a read one an error that
can be explained.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.regular_files import VANISHED, FileState, changed, require_same, still_opened
from gemma_neuron.sharding.cuts import Cut
from gemma_neuron.sharding.piece_sizes import SCRATCH_BYTES

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SHORT_STRIDE = 16 * 1024
"""Rows up to this many bytes are read whole and picked apart in memory; of longer ones only the run is read. A read
of its own costs about as much as copying this much: its call, and the threads' one interpreter lock."""


class SourceFiles:
    """Open files by path, each the one it was when its header was read (`states`).

    Every method may be called by several threads, and raises SourceChangedError or EnvironmentProblem (a read error).
    """

    def __init__(self, states: Mapping[Path, FileState]) -> None:
        self.states = dict(states)
        self._handles: dict[Path, int] = {}
        self._of_thread = threading.local()
        self._open = ExitStack()
        with self._open:
            for path, state in sorted(self.states.items()):
                opened = still_opened(path, path.parent, state)
                self._handles[path] = self._open.enter_context(opened)
            self._open = self._open.pop_all()

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def require_unchanged(self, paths: Iterable[Path] | None = None) -> None:
        """The files (all of them by default) are still those of `states`."""
        for path in self.states if paths is None else paths:
            try:
                found = FileState.of(path)
            except OSError as error:
                raise changed(path, f"{VANISHED} ({error.strerror})") from error
            require_same(path, self.states[path], found)

    def read_into(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes at `offset`."""
        handle, done = self._handles[path], 0
        while done < len(view):
            try:
                count = os.preadv(handle, [view[done:]], offset + done)
            except OSError as error:
                raise _unreadable(path, offset + done, error) from error
            if not count:
                raise changed(path, f"it ended at byte {offset + done:,} while it was read")
            done += count

    def read_ahead(self, path: Path, offset: int, count: int) -> None:
        """Have the system begin to fetch what is read soon, if it is not in memory."""
        handle = self._handles[path]
        # Walking over pages that are there costs as much as reading a good part of them, so both ends are asked first.
        if not (_is_cached(handle, offset) and _is_cached(handle, offset + count - 1)):
            os.posix_fadvise(handle, offset, count, os.POSIX_FADV_WILLNEED)

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
                count = self._read_runs(path, cut, start, rows, view)
            view, position = view[count:], position + count

    def _read_runs(self, path: Path, cut: Cut, start: int, rows: int, view: memoryview) -> int:
        """Each of `rows` runs by a read of its own, the first at `start`; bytes filled."""
        handle, run, last = self._handles[path], cut.run, rows * cut.run
        for first in range(0, last, run):
            piece = view[first : first + run]
            if os.preadv(handle, [piece], start) != run:
                self.read_into(path, piece, start)
            start += cut.stride
        return last

    def _pick(self, path: Path, cut: Cut, index: int, rows: int, view: memoryview) -> int:
        """Runs `index` and after out of whole rows, as many as the scratch memory takes; bytes filled."""
        rows = min(rows, SCRATCH_BYTES // cut.stride)
        span = (rows - 1) * cut.stride + cut.run
        scratch = self._scratch()
        self.read_into(path, scratch[:span], cut.start + index * cut.stride)
        held = np.frombuffer(scratch, np.uint8)
        runs = np.lib.stride_tricks.as_strided(held, (rows, cut.run), (cut.stride, 1))
        count = rows * cut.run
        np.copyto(np.frombuffer(view[:count], np.uint8).reshape(rows, cut.run), runs)
        return count

    def _scratch(self) -> memoryview:
        """`SCRATCH_BYTES` of the calling thread's own."""
        held: memoryview | None = getattr(self._of_thread, "scratch", None)
        if held is None:
            held = self._of_thread.scratch = anonymous_memory(SCRATCH_BYTES)
        return held


def anonymous_memory(count: int, *, huge: bool = False) -> memoryview:
    """`count` bytes of page-aligned memory of this process alone, as unbuffered writing needs it.

    `huge`: in huge pages where the system has them, aligned to them.
    """
    spare = HUGE_PAGE_BYTES if huge else 0
    memory = mmap.mmap(-1, count + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge:
        return memoryview(memory)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(memory)[first : first + count]


def _is_cached(handle: int, offset: int) -> bool:
    """Whether the byte at `offset` is in the page cache; False where the file system cannot tell."""
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _unreadable(path: Path | str, offset: int, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"Reading {path} at byte {offset:,} failed: {error.strerror or error}.",
        "Check the disk or fetch the checkpoint again, then run the same command; committed ranks stay.",
    )
