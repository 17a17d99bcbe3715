"""`--values`: every byte streamed, several tensors at a time, in bounded memory.

In: entries of an index. Out: `non-finite` errors, `all-zero` and `all-one` warnings. bfloat16 and the rest are
judged by their bits, so that no torch is needed and nothing is converted.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemma_neuron.checkpoint import values
from gemma_neuron.checkpoint.index import CheckpointIndex, TensorEntry
from gemma_neuron.reports import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

Progress = Callable[[int, str], None]
"""Called with (bytes just read, name of their tensor)."""
SCANNERS = 4
"""numpy lets other threads run while it counts; each holds about four pieces."""


@dataclass(frozen=True, slots=True)
class FloatBits:
    """How a dtype's bits are read: its integer form, the exponent all ones (not finite), and 1.0."""

    width: str
    exponent: int
    one: int


FLOATS = {
    "BF16": FloatBits("<u2", 0x7F80, 0x3F80),
    "F16": FloatBits("<u2", 0x7C00, 0x3C00),
    "F32": FloatBits("<u4", 0x7F800000, 0x3F800000),
    "F64": FloatBits("<u8", 0x7FF0000000000000, 0x3FF0000000000000),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One tensor's bytes in figures; `zero_pieces` are numbers of pieces without a set bit."""

    entry: TensorEntry
    bad: int
    pieces: int
    zero_pieces: tuple[int, ...]
    all_one: bool


def scan_values(
    index: CheckpointIndex, entries: Iterable[TensorEntry], progress: Progress | None = None
) -> Iterator[Finding]:
    """Findings about the values of floating-point tensors, in the order given; `all-one` ones last."""
    ones: dict[str, list[TensorEntry]] = defaultdict(list)
    wanted = [entry for entry in entries if entry.dtype in FLOATS and entry.bytes]
    with ThreadPoolExecutor(min(SCANNERS, os.cpu_count() or 1)) as pool:
        for seen in pool.map(lambda entry: _scan(index, entry), wanted):
            if progress is not None:
                progress(seen.entry.bytes, seen.entry.name)
            yield from _findings(seen)
            if seen.all_one:
                ones[re.sub(r"\.\d+\.", ".*.", seen.entry.name)].append(seen.entry)
    yield from (_all_one(pattern, group) for pattern, group in ones.items())


def _scan(index: CheckpointIndex, entry: TensorEntry) -> Seen:
    import numpy as np

    form = FLOATS[entry.dtype]
    bad, zero_pieces, number = 0, [], 0
    # A buffer of one value is judged with its kind, in `values.read_buffers`.
    all_one = entry.shape not in ((), (1,))
    for number, piece in enumerate(values.pieces(index, entry), 1):
        bits: NDArray[Any] = np.frombuffer(piece, form.width)
        exponent = bits.dtype.type(form.exponent)
        bad += int(np.count_nonzero((bits & exponent) == exponent))
        all_one = all_one and bool((bits == bits.dtype.type(form.one)).all())
        if not bits.any():
            zero_pieces.append(number - 1)
    return Seen(entry, bad, number, tuple(zero_pieces), all_one)


def _findings(seen: Seen) -> Iterator[Finding]:
    name = seen.entry.name
    if seen.bad:
        message = f"{name} holds {seen.bad:,} values that are not finite."
        yield values.about(seen.entry, "non-finite", message)
    if len(seen.zero_pieces) == seen.pieces:
        message = f"{name} is zero throughout; a file read past its end looks like that."
        yield values.about(seen.entry, "all-zero", message, "warning")
    elif seen.zero_pieces:
        first = seen.zero_pieces[0] * values.PIECE_BYTES
        message = (
            f"{name} has {len(seen.zero_pieces)} stretches of {values.PIECE_BYTES:,} zero bytes, the first at "
            f"its byte {first:,}: an unfinished download looks like that."
        )
        yield values.about(seen.entry, "all-zero", message, "warning")


def _all_one(pattern: str, group: list[TensorEntry]) -> Finding:
    named = (
        f"{group[0].name} is" if len(group) == 1 else f"All values of {len(group)} {pattern} are"
    )
    message = f"{named} exactly one throughout: a new model's norms look like that before they are trained."
    return values.about(group[0], "all-one", message, "warning")
