"""What a rank needs next of the checkpoint, fetched by the system while earlier bytes are cut.

A rank's bytes lie in many places: one range of each column-parallel tensor, short runs all over each row-parallel
one. The system's own read-ahead sees no order in that and fetches little, so it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.sharding.cuts import Cut
from gemma_neuron.sharding.source_files import SourceFiles

BLOCK_BYTES = 4 * 1024 * 1024
AHEAD_BYTES = 128 * 1024 * 1024
"""File bytes asked for and not yet used."""


@dataclass(frozen=True, slots=True)
class _Block:
    path: Path
    offset: int
    count: int
    used_at: int
    """How many of the cuts' bytes have been read when this block's are no longer needed."""


class ReadAhead:
    """Over the cuts of one rank, in the order in which they are read."""

    def __init__(self, files: SourceFiles, cuts: Iterable[tuple[Path, Cut]]) -> None:
        self._files, self._blocks = files, _blocks(cuts)
        self._asked: deque[_Block] = deque()
        self._bytes = 0

    def at(self, position: int) -> None:
        """`position` of the cuts' bytes have been read."""
        while self._asked and self._asked[0].used_at <= position:
            self._bytes -= self._asked.popleft().count
        while self._bytes < AHEAD_BYTES and (block := next(self._blocks, None)) is not None:
            self._files.read_ahead(block.path, block.offset, block.count)
            self._asked.append(block)
            self._bytes += block.count


def _blocks(cuts: Iterable[tuple[Path, Cut]]) -> Iterator[_Block]:
    before = 0
    for path, cut in cuts:
        span = (cut.count - 1) * cut.stride + cut.run
        for offset in range(0, span, BLOCK_BYTES):
            count = min(BLOCK_BYTES, span - offset)
            used_at = before + cut.bytes * (offset + count) // span
            yield _Block(path, cut.start + offset, count, used_at)
        before += cut.bytes
