"""Ranges of a file that may end early."""

from __future__ import annotations

import os


def pread_exactly(handle: int, count: int, offset: int) -> bytes:
    """`count` bytes at `offset`, fewer only where the file ends."""
    pieces = []
    while count > 0:
        piece = os.pread(handle, count, offset)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
