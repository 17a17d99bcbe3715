"""Reading numbers out of tensors in bounded pieces, and what the values of persistent buffers say.

In: entries of an index. Out: value ranges and findings (`non-finite`, `all-zero`, `all-one`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gemma_neuron.checkpoint.index import CheckpointIndex, TensorEntry, exactly
from gemma_neuron.errors import CheckpointError
from gemma_neuron.reports import BufferValues, Finding, FindingKind, Severity

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
    with index.opened(entry.file.name) as file:
        for offset in range(0, entry.bytes, PIECE_BYTES * step):
            count = min(PIECE_BYTES, entry.bytes - offset)
            yield exactly(file, count, entry, offset)


def spots(index: CheckpointIndex, entry: TensorEntry) -> Iterator[bytes]:
    """SPOTS short stretches of a tensor, evenly spread; all of it where it is not longer than they are."""
    step = max(entry.bytes // SPOTS, SPOT_BYTES)
    with index.opened(entry.file.name) as file:
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
                about(entry, "non-finite", f"Buffer {entry.name} holds values that are not finite.")
            )
            continue
        low, high = float(values.min()), float(values.max())
        ranges.append(
            BufferValues(tensor=entry.name, shape=entry.shape, dtype=entry.dtype, min=low, max=high)
        )
        groups[name.rpartition(".")[2]].append((name, entry, low, high))
        if low == high == 0.0:
            message = f"Buffer {entry.name} is zero: its layer's output would be too."
            findings.append(about(entry, "all-zero", message))
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


def about(
    entry: TensorEntry, kind: FindingKind, message: str, severity: Severity = "error"
) -> Finding:
    """A finding about one tensor."""
    return Finding(
        kind=kind, severity=severity, message=message, tensor=entry.name, file=entry.file.name
    )
