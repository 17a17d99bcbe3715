"""Reading numbers out of tensors in bounded pieces: buffers always, everything with `--values`.

In: entries of an index. Out: value ranges and findings (`non-finite`, `all-zero`, `all-one`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gemma_neuron.checkpoint.index import CheckpointIndex, TensorEntry, exactly
from gemma_neuron.errors import CheckpointError
from gemma_neuron.reports import BufferValues, Finding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_BYTES = 8 * 1024 * 1024
"""Divides by every item size; with numpy's temporaries about four times that is held at once."""
LARGEST_BUFFER = 1024 * 1024
SPOTS = 16
SPOT_BYTES = 4096
NUMPY_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def to_float(data: bytes, dtype: str) -> NDArray[np.float32] | NDArray[np.float64]:
    """Values as float32 (float64 for F64); CheckpointError for dtypes of packed quantisation."""
    import numpy as np

    if dtype == "BF16":
        # bfloat16 is the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype not in NUMPY_TYPES:
        raise CheckpointError(
            f"Values of dtype {dtype} cannot be read; bfloat16 or float32 is needed.",
            "Use the checkpoint's unquantised release.",
        )
    values = np.frombuffer(data, NUMPY_TYPES[dtype])
    return values.astype("<f8" if dtype == "F64" else "<f4")


def pieces(index: CheckpointIndex, entry: TensorEntry, step: int = 1) -> Iterator[bytes]:
    """A tensor's bytes in pieces of at most PIECE_BYTES; every `step`-th of them."""
    with index.source.files.opened(entry.file.name) as file:
        for offset in range(0, entry.bytes, PIECE_BYTES * step):
            count = min(PIECE_BYTES, entry.bytes - offset)
            yield exactly(file, count, entry, offset)


def spots(index: CheckpointIndex, entry: TensorEntry) -> Iterator[bytes]:
    """SPOTS short stretches of a tensor, evenly spread; all of it where it is not longer than they are."""
    step = max(entry.bytes // SPOTS, SPOT_BYTES)
    with index.source.files.opened(entry.file.name) as file:
        for offset in range(0, entry.bytes, step):
            yield exactly(file, min(SPOT_BYTES, entry.bytes - offset), entry, offset)


def read_buffers(
    index: CheckpointIndex, buffers: Iterable[tuple[str, TensorEntry]]
) -> tuple[list[BufferValues], list[Finding]]:
    """Ranges of persistent buffers (our name, entry), and what is suspicious about them."""
    import numpy as np

    ranges: list[BufferValues] = []
    findings: list[Finding] = []
    groups: dict[str, list[tuple[str, TensorEntry, float, float]]] = defaultdict(list)
    readable = [  # others are already a finding of dtype or shape
        (name, entry)
        for name, entry in buffers
        if entry.dtype in ("BF16", "F32", "F16") and 0 < entry.bytes <= LARGEST_BUFFER
    ]
    all_values = index.read_all_values([entry for _, entry in readable])
    for (name, entry), values in zip(readable, all_values, strict=True):
        if not bool(np.isfinite(values).all()):
            findings.append(
                _about(
                    entry, "non-finite", f"Buffer {entry.name} holds values that are not finite."
                )
            )
            continue
        low, high = float(values.min()), float(values.max())
        ranges.append(
            BufferValues(tensor=entry.name, shape=entry.shape, dtype=entry.dtype, min=low, max=high)
        )
        groups[name.rpartition(".")[2]].append((name, entry, low, high))
        if low == high == 0.0:
            message = f"Buffer {entry.name} is zero: its layer's output would be too."
            findings.append(_about(entry, "all-zero", message))
    findings += [found for group in groups.values() for found in _all_one(group)]
    return ranges, findings


def _all_one(group: list[tuple[str, TensorEntry, float, float]]) -> Iterator[Finding]:
    """The fingerprint of a lost buffer: every value is what a new model starts with."""
    if not all(low == high == 1.0 for _, _, low, high in group):
        return
    kind = group[0][0].rpartition(".")[2]
    shown = ", ".join("1.0" for _ in group[:12]) + (", …" if len(group) > 12 else "")
    yield Finding(
        kind="all-one",
        severity="warning",
        message=f"All {len(group)} {kind} values are exactly one ({shown}): a freshly initialised model "
        "looks like that, and so does a lost buffer. Compare with the checkpoint's own page.",
        tensor=group[0][1].name,
        file=group[0][1].file.name,
    )


def scan_values(index: CheckpointIndex, entries: Iterable[TensorEntry]) -> Iterator[Finding]:
    """Stream tensors; `non-finite` errors and `all-zero` warnings."""
    for entry in entries:
        yield from _scan(index, entry)


def _scan(index: CheckpointIndex, entry: TensorEntry) -> Iterator[Finding]:
    import numpy as np

    if entry.dtype not in ("BF16", "F16", "F32", "F64") or entry.bytes == 0:
        return
    width, mask = {
        "BF16": ("<u2", 0x7F80),
        "F16": ("<u2", 0x7C00),
        "F32": ("<u4", 0x7F800000),
        "F64": ("<u8", 0x7FF0000000000000),
    }[entry.dtype]
    bad, zero_pieces, count = 0, [], 0
    for number, piece in enumerate(pieces(index, entry)):
        bits: NDArray[Any] = np.frombuffer(piece, width)
        exponent = bits.dtype.type(mask)
        bad += int(np.count_nonzero((bits & exponent) == exponent))
        count += 1
        if not bits.any():
            zero_pieces.append(number)
    if bad:
        message = f"{entry.name} holds {bad:,} values that are not finite."
        yield _about(entry, "non-finite", message)
    if len(zero_pieces) == count:
        yield Finding(
            kind="all-zero",
            severity="warning",
            message=f"{entry.name} is zero throughout; a file read past its end looks like that.",
            tensor=entry.name,
            file=entry.file.name,
        )
    elif zero_pieces:
        first = zero_pieces[0] * PIECE_BYTES
        yield Finding(
            kind="all-zero",
            severity="warning",
            message=f"{entry.name} has {len(zero_pieces)} stretches of {PIECE_BYTES:,} zero bytes, the "
            f"first at its byte {first:,}: an unfinished download looks like that.",
            tensor=entry.name,
            file=entry.file.name,
        )


def _about(entry: TensorEntry, kind: Any, message: str) -> Finding:
    return Finding(
        kind=kind, severity="error", message=message, tensor=entry.name, file=entry.file.name
    )
