"""One rank file on its way to the disk: filled in memory and hashed, written meanwhile, never held whole.

Pieces of memory go round: while one is filled, earlier ones are hashed, in order, by a thread of its own (from the
cache the cores share: hashing follows on the heels of filling), and written by others. Writing goes past the page
cache where the file system allows (O_DIRECT), which on ext4 takes a third of the processor time of copying through it,
in either way (`copy_file_range`, or reading and writing), and leaves nothing for the final fsync to wait for. The
pieces lie in huge pages: a request to the disk is a list of at most some hundred pages (Linux's `max_segments`), and
in pages of 4 KiB that makes small requests, with which a fast virtual disk wrote 2.2 GB/s instead of 4.1.
"""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from blake3 import blake3

from gemma_neuron.sharding.piece_sizes import PIECE_BYTES, PIECES
from gemma_neuron.sharding.source_files import anonymous_memory

WRITERS = 4
"""Writes under way at once. A fast disk does several at a time; a thread that waits for one costs nothing."""
BLOCK_BYTES = 4096
"""What unbuffered writing is a multiple of, in memory and in the file."""


class Piece:
    """Memory for `PIECE_BYTES`, and the work on it while that lasts."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.pending: tuple[Future[None], ...] = ()

    def free(self) -> None:
        """Wait until it is hashed and written; raises what that raised."""
        pending, self.pending = self.pending, ()
        for work in pending:
            work.result()


class Pieces:
    """The memory and the threads that all rank files of a run share."""

    def __init__(self) -> None:
        memory = anonymous_memory(PIECES * PIECE_BYTES, huge=True)
        self.ring = [
            Piece(memory[first : first + PIECE_BYTES])
            for first in range(0, len(memory), PIECE_BYTES)
        ]
        self.writing = ThreadPoolExecutor(WRITERS, "shard-write")
        self.hashing = ThreadPoolExecutor(1, "shard-hash")

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self.writing.shutdown()
        self.hashing.shutdown()


class Outlet:
    """A file of exactly `size` bytes at `path`: `room`, fill it, `filled`, again; then `finish`.

    Its space is taken at once, so that a full disk says so before anything is written. Raises OSError.
    """

    def __init__(self, path: Path, size: int, pieces: Pieces) -> None:
        self.path, self.size, self.pieces = path, size, pieces
        self.hasher = blake3()
        self.offset = self.used = self.turn = 0
        self.handle, self.direct = _opened(path)
        try:
            os.posix_fallocate(self.handle, 0, max(1, size))
        except OSError:
            self.abandon()
            raise

    def room(self) -> memoryview:
        """Free memory, to be filled; never empty."""
        piece = self.pieces.ring[self.turn]
        if not self.used:
            piece.free()
        return piece.view[self.used :]

    def filled(self, count: int) -> None:
        """`count` bytes of `room` now hold the file's next bytes."""
        self.used += count
        if self.used == PIECE_BYTES:
            self._send()

    def finish(self) -> str:
        """All bytes on the disk; blake3 of the file."""
        if self.used:
            self._send()
        for piece in self.pieces.ring:
            piece.free()
        os.ftruncate(self.handle, self.size)  # the last block was written whole
        os.fsync(self.handle)
        os.close(self.handle)
        self.handle = -1
        return self.hasher.hexdigest()

    def abandon(self) -> None:
        """Give the file up, finished or not, and its space back."""
        if self.handle >= 0:
            wait([work for piece in self.pieces.ring for work in piece.pending])
            for piece in self.pieces.ring:
                piece.pending = ()
            os.close(self.handle)
            self.handle = -1
        self.path.unlink(missing_ok=True)

    def _send(self) -> None:
        piece, count = self.pieces.ring[self.turn], self.used
        whole = -(-count // BLOCK_BYTES) * BLOCK_BYTES
        piece.view[count:whole] = bytes(whole - count)
        piece.pending = (
            self.pieces.hashing.submit(self._hash, piece.view[:count]),
            self.pieces.writing.submit(self._write, piece.view[:whole], self.offset),
        )
        self.offset += count
        self.used, self.turn = 0, (self.turn + 1) % PIECES

    def _hash(self, view: memoryview) -> None:
        self.hasher.update(view)

    def _write(self, view: memoryview, offset: int) -> None:
        while len(view):
            direct = self.direct
            try:
                count = os.pwrite(self.handle, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._make_buffered()  # the file system wants larger blocks
                continue
            view, offset = view[count:], offset + count

    def _make_buffered(self) -> None:
        """Through the page cache from now on."""
        self.direct = False
        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        fcntl.fcntl(self.handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _opened(path: Path) -> tuple[int, bool]:
    """A new file's handle, and whether it is unbuffered, which not every file system knows."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644), False
