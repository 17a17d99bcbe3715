"""Rank files put together again: whole tensors from the ranks' parts, piece by piece, to compare or to digest.

In: committed rank files and the plan. Out: the whole tensor's bytes in order, and where they first differ from
others. It joins parts along the axis they were cut at, from the shapes in the files alone: what wrote them has no
part in it. Memory: a few pieces of `PIECE_BYTES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from gemma_neuron.errors import IntegrityError
from gemma_neuron.source_entries import source_entries

if TYPE_CHECKING:
    from gemma_neuron.plan import Placement, PlannedParameter
    from gemma_neuron.port import Port

Bytes = NDArray[np.uint8]
Expected = Callable[[int, int], Bytes]
"""(offset in the whole tensor, count) → what the bytes there should be."""

PIECE_BYTES = 8 * 1024 * 1024
JOINED_AXIS = {
    "whole": 0,
    "rows": 0,
    "repeated-rows": 0,
    "columns": 1,
    "expert-gate-up": 1,
    "expert-down": 2,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's place in a safetensors file; `start` is absolute."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


class TensorFile:
    """An open safetensors file, read by ranges. Raises IntegrityError where it is not what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._layout()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise IntegrityError(f"{path} has no readable safetensors header: {error}.") from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.handle)

    def _layout(self) -> dict[str, Stored]:
        size = os.fstat(self.handle).st_size
        length = int.from_bytes(os.pread(self.handle, 8, 0), "little")
        if length > size - 8:
            raise ValueError(f"it would take {length:,} of {size:,} bytes")
        header = json.loads(os.pread(self.handle, length, 8))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            first, end = (int(offset) for offset in entry["data_offsets"])
            if not 0 <= first <= end <= size - 8 - length:
                raise ValueError(f"{name} lies outside the file")
            shape = tuple(int(axis) for axis in entry["shape"])
            found[name] = Stored(str(entry["dtype"]), shape, 8 + length + first, end - first)
        return found

    def read(self, name: str, offset: int = 0, count: int | None = None) -> Bytes:
        """`count` bytes of a tensor from its byte `offset` on; all the rest by default."""
        place = self.tensors[name]
        room = np.empty(place.bytes - offset if count is None else count, np.uint8)
        done = 0
        while done < room.nbytes:
            got = os.preadv(self.handle, [room.data[done:]], place.start + offset + done)
            if not got:
                raise IntegrityError(f"{self.path} ended inside {name} while it was read.")
            done += got
        return room


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte of a whole tensor that is not what it should be."""

    tensor: str
    rank: int
    byte: int
    found: int
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.tensor}: rank {self.rank} holds another byte {self.byte:,} of the whole tensor, "
            f"0x{self.found:02x} instead of 0x{self.expected:02x}"
        )


@dataclass(frozen=True, slots=True)
class Whole:
    """One whole copy of a tensor: `ranks` hold its parts, in order."""

    name: str
    kind: str
    ranks: tuple[int, ...]
    files: Sequence[TensorFile]
    """Of all ranks, by number."""

    def pieces(self) -> Iterator[tuple[int, Bytes]]:
        """(offset, bytes) over the whole tensor, in order."""
        parts = len(self.ranks)
        rows, run = self._rows()
        if run * parts > PIECE_BYTES:
            for row in range(rows):
                for part, rank in enumerate(self.ranks):
                    for first in range(0, run, PIECE_BYTES):
                        count = min(PIECE_BYTES, run - first)
                        data = self.files[rank].read(self.name, row * run + first, count)
                        yield (row * parts + part) * run + first, data
            return
        block = max(1, PIECE_BYTES // max(1, run * parts))
        for row in range(0, rows, block):
            count = min(block, rows - row)
            read = [self.files[r].read(self.name, row * run, count * run) for r in self.ranks]
            joined = np.concatenate([data.reshape(count, run) for data in read], axis=1)
            yield row * run * parts, joined.reshape(-1)

    def digest(self) -> str:
        hasher = blake3(max_threads=blake3.AUTO)
        for _, data in self.pieces():
            hasher.update(data.data)
        return hasher.hexdigest()

    def first_difference(self, expected: Expected) -> Difference | None:
        for offset, data in self.pieces():
            wanted = expected(offset, data.nbytes)
            if not np.array_equal(data, wanted):
                at = int(np.argmax(data != wanted))
                rank = self.ranks[(offset + at) // self._rows()[1] % len(self.ranks)]
                return Difference(self.name, rank, offset + at, int(data[at]), int(wanted[at]))
        return None

    def first_difference_from(self, other: Whole) -> Difference | None:
        """Against another whole copy of the same tensor, cut in the same way."""
        pieces = other.pieces()
        return self.first_difference(lambda offset, count: next(pieces)[1])

    def _rows(self) -> tuple[int, int]:
        """How often a part's bytes alternate with the others', and how many of them each time."""
        stored = self.files[self.ranks[0]].tensors[self.name]
        if len(self.ranks) == 1:
            return 1, stored.bytes
        rows = prod(stored.shape[: JOINED_AXIS[self.kind]])
        if self.kind == "expert-gate-up":
            rows *= 2  # gate's half, then up's
        return rows, stored.bytes // max(1, rows)


def wholes(parameter: PlannedParameter, files: Sequence[TensorFile], tp: int) -> Iterator[Whole]:
    """Every whole copy of a tensor that the ranks hold between them: one where each has a part of its own."""
    for ranks in _copies(parameter.placement, tp):
        yield Whole(parameter.name, parameter.placement.kind, ranks, files)


def _copies(placement: Placement, tp: int) -> list[tuple[int, ...]]:
    holders: dict[int, list[int]] = {}
    for rank in range(tp):
        holders.setdefault(placement.part_of_rank(rank, tp), []).append(rank)
    return list(zip(*(holders[part] for part in sorted(holders)), strict=True))


def recorded_digests(port: Port) -> dict[str, str]:
    """Our name of a tensor → blake3 of its bytes in the checkpoint, as recorded at sharding."""
    entries = source_entries(port) or ()
    return {name: text for entry in entries for name, text in (entry.tensors or {}).items()}


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file of the checkpoint as recorded at sharding, all of whose tensors (`names`, in its order) are used."""

    name: str
    blake3: str
    header: str
    names: tuple[str, ...]

    def is_made_up_by(self, wholes: Iterable[Whole]) -> bool:
        """Whether header and tensors, these in the order of `names`, are the file's bytes."""
        header = self.header.encode()
        hasher = blake3(len(header).to_bytes(8, "little") + header, max_threads=blake3.AUTO)
        for whole in wholes:
            for _, data in whole.pieces():
                hasher.update(data.data)
        return hasher.hexdigest() == self.blake3


def recorded_files(port: Port) -> list[WholeFile]:
    """The files of `source.json` that have no digest a tensor."""
    return [
        WholeFile(entry.name, entry.blake3, entry.header, entry.names)
        for entry in source_entries(port) or ()
        if entry.blake3 is not None and entry.header is not None and entry.names is not None
    ]
