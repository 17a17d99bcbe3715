"""Files on their way between machines, in pieces: an answer that takes long to arrive is a sign of life too late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PIECE_BYTES = 32 * 1024 * 1024
"""3 s at 100 Mbit/s, where ten count as hung."""
Piece = tuple[str, bytes]
"""A file's name and its next bytes."""


def pieces(files: Mapping[str, bytes]) -> Iterator[Piece]:
    """The files cut small; an empty one is one empty piece."""
    for name, data in files.items():
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            yield name, data[start : start + PIECE_BYTES]


class Parcel:
    """Puts files together again."""

    def __init__(self) -> None:
        self._files: dict[str, list[bytes]] = {}

    def add(self, piece: Piece) -> None:
        name, data = piece
        self._files.setdefault(name, []).append(data)

    def files(self) -> dict[str, bytes]:
        return {name: b"".join(parts) for name, parts in self._files.items()}
