"""Which bytes of a checkpoint tensor a rank holds, as ranges of the source file.

A row-parallel slice is one contiguous range; column-parallel ones are one range a row, read in blocks of
rows. Nothing here holds more than one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from gemma_neuron.artifacts import CHUNK_BYTES
from gemma_neuron.errors import IntegrityError
from gemma_neuron.plan import Placement

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}


class TensorSource(Protocol):
    """Where a tensor's bytes lie: `bytes` of them from absolute offset `start` of `file`."""

    @property
    def file(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def read_exactly(handle: int, count: int, offset: int, file: Path) -> bytes:
    """`count` bytes at `offset`; IntegrityError when the file ends first (it changed under us)."""
    data = os.pread(handle, count, offset)
    while len(data) < count:
        more = os.pread(handle, count - len(data), offset + len(data))
        if not more:
            raise IntegrityError(
                f"{file} ended at byte {offset + len(data)} while {count} bytes at {offset} were read: "
                "the source changed during the run.",
                "Restore the checkpoint and run the same command again; committed ranks stay.",
            )
        data += more
    return data


def _range(handle: int, start: int, count: int, file: Path) -> Iterator[bytes]:
    for offset in range(0, count, CHUNK_BYTES):
        yield read_exactly(handle, min(CHUNK_BYTES, count - offset), start + offset, file)


def whole_bytes(handle: int, source: TensorSource) -> Iterator[bytes]:
    """All of a tensor, in bounded pieces."""
    return _range(handle, source.start, source.bytes, source.file)


def rank_bytes(
    handle: int, source: TensorSource, placement: Placement, rank: int, tp: int
) -> Iterator[bytes]:
    """The bytes of rank `rank`'s part in C order, in pieces of about `CHUNK_BYTES`."""
    part = placement.part_of_rank(rank, tp)
    if placement.kind == "whole":
        return whole_bytes(handle, source)
    if placement.kind in ("rows", "repeated-rows"):
        count = source.bytes // placement.parts
        return _range(handle, source.start + part * count, count, source.file)
    if placement.kind == "expert-gate-up":
        return _half_rows(handle, source, placement.parts, part)
    return _columns(handle, source, placement.parts, part)


def _columns(handle: int, source: TensorSource, parts: int, part: int) -> Iterator[bytes]:
    """The last dimension's part, read in blocks of whole rows."""
    item = ITEM_BYTES[source.dtype]
    width = source.shape[-1]
    rows, row_bytes, local = prod(source.shape[:-1]), width * item, width // parts
    block = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, rows, block):
        count = min(block, rows - first)
        data = read_exactly(
            handle, count * row_bytes, source.start + first * row_bytes, source.file
        )
        grid = np.frombuffer(data, dtype=np.uint8).reshape(count, row_bytes)
        yield grid[:, part * local * item : (part + 1) * local * item].tobytes()


def _half_rows(handle: int, source: TensorSource, parts: int, part: int) -> Iterator[bytes]:
    """[experts, 2 · width, hidden]: the part's rows of the gate half, then of the up half, per expert."""
    experts, rows, hidden = source.shape
    row_bytes = hidden * ITEM_BYTES[source.dtype]
    half, local = rows // 2, rows // 2 // parts
    for expert in range(experts):
        for first in (0, half):
            row = expert * rows + first + part * local
            start = source.start + row * row_bytes
            yield from _range(handle, start, local * row_bytes, source.file)
