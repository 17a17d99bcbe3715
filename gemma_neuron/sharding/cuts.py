"""Which bytes of a checkpoint tensor a rank holds: runs of equal length, equally far apart.

Every placement comes to that: whole and row-parallel parts are one run, a last dimension's part is a run a row, an
expert's gate and up halves are a run each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class Cut:
    """`count` runs of `run` bytes, the first at absolute offset `start` of a file, each `stride` after the last."""

    start: int
    run: int
    stride: int
    count: int

    @property
    def bytes(self) -> int:
        return self.run * self.count


def cut_of(source: TensorSource, placement: Placement, rank: int, tp: int) -> Cut:
    """Where rank `rank`'s part of a tensor lies, its bytes in C order."""
    part, parts = placement.part_of_rank(rank, tp), placement.parts
    if placement.kind == "whole":
        return Cut(source.start, source.bytes, source.bytes, 1)
    if placement.kind in ("rows", "repeated-rows"):
        run = source.bytes // parts
        return Cut(source.start + part * run, run, run, 1)
    item, width = ITEM_BYTES[source.dtype], source.shape[-1]
    if placement.kind == "expert-gate-up":
        experts, rows, _ = source.shape  # gate's rows, then up's
        half = rows // 2 * width * item
        run = half // parts
        return Cut(source.start + part * run, run, half, experts * 2)
    stride = width * item
    run = stride // parts
    return Cut(source.start + part * run, run, stride, prod(source.shape[:-1]))
