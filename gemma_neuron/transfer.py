"""Large files fetched in parts: several at once, resumed after any death, within bounds of time and disk.

In: a size and a function that yields the bytes of a range. Out: the file, whole, at its place, and the digest
of each part. While it grows there are two files: `<partial>` itself, sparse, and `<partial>.parts`, a line for
each finished part with its digest. After a death a part counts only if its bytes still have that digest.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from gemma_neuron.artifacts import LOG_SUFFIX, free_bytes, sync_folder
from gemma_neuron.errors import DiskFullError

if TYPE_CHECKING:
    import stamina

PART_BYTES = 16 * 1024 * 1024
WORKERS = 8
"""Parts at once: at most WORKERS times PART_BYTES are fetched again after a death."""
PIECE_BYTES = 1024 * 1024
TRIES = 6
"""Of one request; the waits between them sum to about ten seconds."""
LONGEST_WAIT = 60.0
"""Seconds; a server that asks for more patience than that is reported instead."""
SPARE_BYTES = 64 * 1024 * 1024
"""Left free when a download is let in: other files grow too."""

Progress = Callable[[int], None]
"""Called with the bytes that arrived since the last call, one caller at a time."""
Fetch = Callable[[int, int], Iterator[bytes]]
"""(offset, count) → the bytes of that range, in pieces."""
Retry = Callable[[Exception], "bool | float"]
"""Whether an error is worth another try; a number is the seconds the server asked to wait."""


class Hash(Protocol):
    """What hashlib and blake3 have in common."""

    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


class CutShortError(Exception):
    """A stream ended before its range did."""


def retrying(retry: Retry) -> Iterator[stamina.Attempt]:
    """Attempts at one request, with growing, jittered waits between them."""
    import stamina

    # Its own hooks would log to stdout, which belongs to results.
    stamina.instrumentation.set_on_retry_hooks([])

    def wanted(error: Exception) -> bool | float:
        if isinstance(error, CutShortError | _StoppedError):
            return isinstance(error, CutShortError)
        answer = retry(error)
        return answer if isinstance(answer, bool) else answer <= LONGEST_WAIT and answer

    yield from stamina.retry_context(
        on=wanted, attempts=TRIES, timeout=None, wait_initial=0.2, wait_max=5.0, wait_jitter=0.5
    )


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise DiskFullError, with both numbers, when `needed` more bytes do not fit."""
    free = free_bytes(folder)
    if needed and needed + SPARE_BYTES > free:
        raise DiskFullError(
            f"{what} needs {needed:,} more bytes in {folder}; {free:,} are free there.",
            "Free some room, or name a larger disk (HF_HUB_CACHE, GEMMA_NEURON_CACHE).",
        )


@contextmanager
def disk_errors(folder: Path, what: str) -> Iterator[None]:
    """A full disk met on the way becomes a DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            f"{what}: {folder} is full, {free_bytes(folder):,} bytes are free.",
            "Free some room and run the same command; finished parts stay.",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One file to be fetched. `partial` must name the content, so that another content is another file."""

    size: int
    partial: Path
    new_hash: Callable[[], Hash]
    part_bytes: int = PART_BYTES

    @property
    def parts(self) -> int:
        return max(1, -(-self.size // self.part_bytes))

    @property
    def _log(self) -> Path:
        return self.partial.with_name(self.partial.name + LOG_SUFFIX)

    def missing_bytes(self) -> int:
        """What is still to be fetched, going by the log alone."""
        return self.size - sum(self._length(number) for number in self._logged())

    def run(self, fetch: Fetch, retry: Retry, progress: Progress) -> list[str]:
        """Fetch what is missing; the digests of all parts. Progress counts kept parts too."""
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(handle, self.size)
            return _Run(self, handle, fetch, retry, progress).run()
        finally:
            os.close(handle)

    def finish(self, target: Path) -> None:
        """Move the whole file to its place, durably."""
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        self.partial.replace(target)
        sync_folder(target.parent)
        self._log.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget what was fetched."""
        self._log.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)

    def _length(self, number: int) -> int:
        return min(self.part_bytes, self.size - number * self.part_bytes)

    def _head(self) -> str:
        return f"parts of {self.part_bytes} of {self.size}"

    def _logged(self) -> dict[int, str]:
        """Part → digest, from a log of the same division of a file that is still there."""
        if not (self._log.is_file() and self.partial.is_file()):
            return {}
        head, _, body = self._log.read_text(encoding="ascii", errors="replace").partition("\n")
        if head != self._head():
            return {}
        found = re.findall(r"^(\d{1,9}) ([0-9a-f]{32,128})$", body, re.MULTILINE)
        return {int(number): digest for number, digest in found if int(number) < self.parts}


class _StoppedError(Exception):
    """Another part failed, or the process is to end."""


Item = TypeVar("Item")
Result = TypeVar("Result")


def all_of(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    stop: threading.Event | None = None,
) -> list[Result]:
    """`work` of each item, several at once. The first error, or a signal, ends it and sets `stop`.

    The threads are daemons, which an executor's are not, and nobody waits for them then: one that waits for a server
    that does not answer keeps no process from ending.
    """
    stop = stop or threading.Event()
    waiting, results = iter(enumerate(items)), dict[int, Result]()
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    lock = threading.Lock()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    number, item = next(waiting, (-1, None))
                if number < 0:
                    break
                results[number] = work(cast(Item, item))
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    threads = [
        threading.Thread(target=run, name="transfer", daemon=True)
        for _ in range(min(workers, len(items)))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            error = ends.get()
            if error is not None:
                raise error
    except BaseException:
        stop.set()
        raise
    return [results[number] for number in range(len(items))]


class _Run:
    """One process's work on a transfer. Threads that nobody waits for any more may come back late: they write nothing
    then."""

    def __init__(
        self, transfer: Transfer, handle: int, fetch: Fetch, retry: Retry, progress: Progress
    ) -> None:
        self.transfer, self.handle = transfer, handle
        self.fetch, self.retry, self.progress = fetch, retry, progress
        self.logging, self.telling = threading.Lock(), threading.Lock()
        self.stop = threading.Event()
        self.writing = threading.Semaphore(WORKERS)
        """Each write holds one, and the end all for a moment: no file is closed, and its number given to another, while
        a thread writes. Nobody is told of bytes under it: a terminal may take no line for as long as it likes."""

    def run(self) -> list[str]:
        logged = self.transfer._logged()
        with self.transfer._log.open("a" if logged else "w", encoding="ascii") as self.log:
            if not logged:
                self._write_line(self.transfer._head())
            numbers = range(self.transfer.parts)
            try:
                return all_of(
                    lambda number: self._part(number, logged.get(number)),
                    numbers,
                    WORKERS,
                    self.stop,
                )
            finally:
                self.stop.set()
                for _ in range(WORKERS):
                    self.writing.acquire()
                self.writing.release(WORKERS)

    def _part(self, number: int, logged: str | None) -> str:
        if logged is not None and self._digest_on_disk(number) == logged:
            self._arrived(self.transfer._length(number))
            return logged
        start, count = number * self.transfer.part_bytes, self.transfer._length(number)
        hasher, done = self.transfer.new_hash(), 0
        for attempt in retrying(lambda error: not self.stop.is_set() and self.retry(error)):
            with attempt:
                self._go_on()
                for piece in self.fetch(start + done, count - done) if done < count else ():
                    kept = piece[: count - done]
                    self._write(kept, start + done)
                    hasher.update(kept)
                    done += len(kept)
                if done < count:
                    raise CutShortError(f"{done:,} of {count:,} bytes came")
        digest = hasher.hexdigest()
        with self.writing, self.logging:
            self._go_on()
            self._write_line(f"{number} {digest}")
        return digest

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise _StoppedError

    def _write(self, piece: bytes, offset: int) -> None:
        with self.writing:
            self._go_on()
            view = memoryview(piece)
            while view:
                written = os.pwrite(self.handle, view, offset)
                view, offset = view[written:], offset + written
        self._arrived(len(piece))

    def _write_line(self, line: str) -> None:
        self.log.write(line + "\n")
        self.log.flush()

    def _arrived(self, count: int) -> None:
        with self.telling:
            self._go_on()
            self.progress(count)

    def _digest_on_disk(self, number: int) -> str:
        hasher, length = self.transfer.new_hash(), self.transfer._length(number)
        start = number * self.transfer.part_bytes
        for offset in range(start, start + length, PIECE_BYTES):
            hasher.update(os.pread(self.handle, min(PIECE_BYTES, start + length - offset), offset))
        return hasher.hexdigest()
