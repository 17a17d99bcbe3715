"""The header of one safetensors file, read strictly: https://github.com/huggingface/safetensors#format

In: bytes from a file of strangers. Out: `TensorEntry`s of what is sound and `Finding`s of what is not.
A file is 8 bytes of header length (little-endian), the JSON header, and tensors without holes between them.
Never raises on content, and never asks for more bytes than the file has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.checkpoint.storage import OpenFile
from gemma_neuron.names import LONGEST_NAME, is_plain_name
from gemma_neuron.regular_files import FileState
from gemma_neuron.reports import Finding, FindingKind
from gemma_neuron.strict_json import BadJsonError, parse_json

HEADER_LIMIT = 100_000_000
"""MAX_HEADER_SIZE of the safetensors library, which stock transformers reads the same files with."""
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
MOST_FINDINGS = 100
"""Per file: a hostile header must not turn into a report of a million lines."""
MOST_VALUES = 1_000_000
"""Room for 100,000 tensors, ten times what the largest checkpoints have. JSON takes 3 bytes for a value that
Python keeps in 64: without a bound a header of 100 MB would become gigabytes."""
MOST_AXES = 16
LARGEST_NUMBER = 2**63 - 1
LFS_POINTER = b"version https://git-lfs"
"""What a clone without git-lfs leaves in the place of each weights file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor's place: `bytes` from absolute offset `start` of `file`, dtype as safetensors spells it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one file's header says; `raw` are the header's own bytes (for the digest).

    `state`: the file's before the header was read; None of a file elsewhere.
    """

    file: Path
    size: int
    raw: bytes
    tensors: tuple[TensorEntry, ...]
    findings: tuple[Finding, ...]
    state: FileState | None


def read_header(opened: OpenFile, file: Path) -> FileHeader:
    """Header of an open file, named `file` in findings."""
    size, state = opened.size, opened.state
    start = opened.read(64, 0)
    problem = _start_problem(start, size, file.name)
    if problem is not None:
        return FileHeader(file, size, start, (), (problem,), state)
    length = int.from_bytes(start[:8], "little")
    raw = opened.read(length, 8)
    if len(raw) < length:  # cut while it was read
        short = _finding("truncated-file", f"ends inside its header of {length:,} bytes", file.name)
        return FileHeader(file, size, raw, (), (short,), state)
    tensors, findings = _Parser(file, 8 + length, size).parse(raw)
    return FileHeader(file, size, raw, tensors, findings, state)


def _finding(kind: FindingKind, what: str, file: str, tensor: str = "") -> Finding:
    return Finding(kind=kind, severity="error", message=f"{file} {what}.", tensor=tensor, file=file)


def _start_problem(start: bytes, size: int, name: str) -> Finding | None:
    """What the first bytes alone show: no safetensors file, or the beginning of one."""
    if start.startswith(LFS_POINTER):
        return _finding(
            "bad-header",
            "is a Git LFS pointer, not the file it points to; run `git lfs pull` in the checkpoint",
            name,
        )
    if size < 8:
        return _finding(
            "truncated-file", f"has {size} bytes; the header length alone takes 8", name
        )
    length = int.from_bytes(start[:8], "little")
    if length > HEADER_LIMIT or start[8:9] not in (b"{", b""):
        begin = "" if start[8:9] == b"{" else f" that begins with {start[8:12]!r} instead of '{{'"
        return _finding(
            "bad-header",
            f"is no safetensors file or a damaged one: it announces a header of {length:,} bytes (at most "
            f"{HEADER_LIMIT:,} are read){begin}",
            name,
        )
    if 8 + length > size:
        return _finding(
            "truncated-file",
            f"announces a header of {length:,} bytes but has {size:,} in all",
            name,
        )
    return None


class _Parser:
    """Turns one header's text into entries, collecting what is wrong on the way."""

    def __init__(self, file: Path, data_start: int, size: int) -> None:
        self.file = file
        self.data_start = data_start
        self.data_bytes = size - data_start
        self.findings: list[Finding] = []

    def parse(self, raw: bytes) -> tuple[tuple[TensorEntry, ...], tuple[Finding, ...]]:
        try:
            header = parse_json(raw, MOST_VALUES)
        except BadJsonError as error:
            self._add("bad-header", f"has a header that is no sound JSON: {error}")
            return (), tuple(self.findings)
        self._check_metadata(header.pop("__metadata__", {}))
        entries = []
        for name, item in header.items():
            if len(self.findings) > MOST_FINDINGS:
                break
            entry = self._entry(name, item)
            if entry is not None:
                entries.append(entry)
        sound = self._check_layout(sorted(entries, key=lambda e: (e.start, e.bytes)))
        return tuple(sound), tuple(self.findings)

    def _add(self, kind: FindingKind, what: str, tensor: str = "") -> None:
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(_finding(kind, what, self.file.name, tensor))
        elif len(self.findings) == MOST_FINDINGS:
            more = "has more faults than are listed"
            self.findings.append(_finding("bad-header", more, self.file.name))

    def _check_metadata(self, found: object) -> None:
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            self._add("bad-header", "has a __metadata__ that does not map texts to texts")

    def _entry(self, name: str, item: object) -> TensorEntry | None:
        if not is_plain_name(name):
            self._add(
                "unsafe-name",
                f"holds a tensor named {name[:80]!r}: {len(name)} characters, which must be printable "
                f"and at most {LONGEST_NAME}",
                name[:80],
            )
            return None
        if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
            self._add(
                "bad-header",
                f"describes {name} without exactly dtype, shape and data_offsets",
                name,
            )
            return None
        dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BITS:
            self._add(
                "dtype", f"gives {name} the dtype {str(dtype)[:40]!r}, which is unknown", name
            )
            return None
        if not _are_counts(shape) or len(shape) > MOST_AXES:
            self._add("bad-header", f"gives {name} the shape {str(shape)[:80]}", name)
            return None
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._add("offset-out-of-range", f"gives {name} the offsets {str(offsets)[:80]}", name)
            return None
        begin, end = offsets
        bits = math.prod(shape) * ITEM_BITS[dtype]
        if bits != 8 * (end - begin):
            self._add(
                "bad-header",
                f"gives {name} {end - begin:,} bytes; {dtype} {list(shape)} takes {bits / 8:,.0f}",
                name,
            )
            return None
        return TensorEntry(
            name=name,
            file=self.file,
            dtype=dtype,
            shape=tuple(shape),
            start=self.data_start + begin,
            bytes=end - begin,
        )

    def _check_layout(self, entries: list[TensorEntry]) -> list[TensorEntry]:
        """Tensors must follow one another without holes and end where the file ends."""
        sound, reached, hole = [], self.data_start, False
        for entry in entries:
            if entry.start < reached:
                self._add(
                    "offset-overlap",
                    f"places {entry.name} at byte {entry.start:,}, inside the tensor that ends at "
                    f"{reached:,}",
                    entry.name,
                )
                continue
            hole = hole or entry.start > reached
            reached = entry.start + entry.bytes
            sound.append(entry)
        return self._check_end(sound, reached, hole or bool(self.findings))

    def _check_end(
        self, entries: list[TensorEntry], reached: int, faulty: bool
    ) -> list[TensorEntry]:
        size = self.data_start + self.data_bytes
        outside = [entry for entry in entries if entry.start + entry.bytes > size]
        if outside and not faulty:
            # The layout is sound in itself: the end of the file is what is missing.
            self._add(
                "truncated-file",
                f"has {size:,} bytes; its header describes {reached:,}. {outside[0].name} is the first "
                f"of {len(outside)} tensors that are cut",
                outside[0].name,
            )
        elif outside:
            for entry in outside[:MOST_FINDINGS]:
                self._add(
                    "offset-out-of-range",
                    f"places {entry.name} up to byte {entry.start + entry.bytes:,}, but has {size:,}",
                    entry.name,
                )
        elif faulty and not self.findings:
            self._add("bad-header", "has a hole between its tensors")
        elif reached < size and not faulty:
            self._add(
                "bad-header",
                f"has {size - reached:,} bytes after its last tensor that belong to none",
            )
        return [entry for entry in entries if entry.start + entry.bytes <= size]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= LARGEST_NUMBER for value in values
    )
