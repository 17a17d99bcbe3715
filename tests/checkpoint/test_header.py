from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.checkpoint.header import HEADER_LIMIT, FileHeader, read_header
from gemma_neuron.checkpoint.storage import LocalFile


def header_of(path: Path, data: bytes) -> FileHeader:
    path.write_bytes(data)
    handle = os.open(path, os.O_RDONLY)
    try:
        return read_header(LocalFile(handle, len(data)), path)
    finally:
        os.close(handle)


def file_of(header: object, body: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * body


def tensor(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


CASES: dict[str, tuple[bytes, str, str]] = {
    # name: (file, kind, tensor)
    "empty file": (b"", "truncated-file", ""),
    "seven bytes": (b"\x08" * 7, "truncated-file", ""),
    "header longer than file": (struct.pack("<Q", 1000) + b"{}", "truncated-file", ""),
    "huge header": (struct.pack("<Q", HEADER_LIMIT + 1) + b"{}", "bad-header", ""),
    "negative header length": (b"\xff" * 8 + b"{}", "bad-header", ""),
    "empty header": (file_of(b"", 0), "bad-header", ""),
    "no json": (file_of(b"{not json}", 0), "bad-header", ""),
    "not utf-8": (file_of(b'{"\xff": 1}', 0), "bad-header", ""),
    "leading blank": (file_of(b" {}", 0), "bad-header", ""),
    "a list": (file_of(b"[]", 0), "bad-header", ""),
    "two objects": (file_of(b"{}{}", 0), "bad-header", ""),
    "deep nesting": (file_of(b'{"a":' * 20_000, 0), "bad-header", ""),
    "pickle": (b"\x80\x04\x95" + b"\0" * 100, "bad-header", ""),
    "zip": (b"PK\x03\x04" + b"\0" * 100, "bad-header", ""),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "bad-header", ""),
    "doubled key": (
        file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4), "bad-header", ""),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}, 0), "bad-header", ""),
    "metadata a text": (file_of({"__metadata__": "pt"}, 0), "bad-header", ""),
    "tensor a number": (file_of({"a": 5}, 0), "bad-header", "a"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4), "bad-header", "a"),
    "one key more": (file_of({"a": tensor(0, 4) | {"x": 1}}, 4), "bad-header", "a"),
    "unknown dtype": (file_of({"a": tensor(0, 4, dtype="F31")}, 4), "dtype", "a"),
    "dtype a list": (file_of({"a": tensor(0, 4, dtype=["F32"])}, 4), "dtype", "a"),
    "negative axis": (file_of({"a": tensor(0, 4, [-1])}, 4), "bad-header", "a"),
    "fractional axis": (file_of({"a": tensor(0, 4, [1.0])}, 4), "bad-header", "a"),
    "true for an axis": (file_of({"a": tensor(0, 4, [True])}, 4), "bad-header", "a"),
    "shape a text": (file_of({"a": tensor(0, 4, "1")}, 4), "bad-header", "a"),
    "axis past 63 bits": (file_of({"a": tensor(0, 4, [2**64])}, 4), "bad-header", "a"),
    "product past 64 bits": (file_of({"a": tensor(0, 4, [2**62] * 9)}, 4), "bad-header", "a"),
    "size differs": (file_of({"a": tensor(0, 4, [2])}, 4), "bad-header", "a"),
    "half bytes": (file_of({"a": tensor(0, 1, [1], "F4")}, 1), "bad-header", "a"),
    "one offset": (
        file_of({"a": {"dtype": "F32", "shape": [], "data_offsets": [0]}}, 4),
        "offset-out-of-range", "a"),
    "offsets reversed": (
        file_of({"a": {"dtype": "F32", "shape": [], "data_offsets": [4, 0]}}, 4),
        "offset-out-of-range", "a"),
    "offset negative": (
        file_of({"a": {"dtype": "F32", "shape": [], "data_offsets": [-4, 0]}}, 4),
        "offset-out-of-range", "a"),
    "past the end, with a hole": (
        file_of({"a": tensor(0, 4), "b": tensor(100, 104)}, 8), "offset-out-of-range", "b"),
    "overlap": (file_of({"a": tensor(0, 8), "b": tensor(4, 12)}, 12), "offset-overlap", "b"),
    "same bytes twice": (file_of({"a": tensor(0, 4), "b": tensor(0, 4)}, 4), "offset-overlap", "b"),
    "hole": (file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, 12), "bad-header", ""),
    "hole in front": (file_of({"a": tensor(4, 8)}, 8), "bad-header", ""),
    "bytes left over": (file_of({"a": tensor(0, 4)}, 12), "bad-header", ""),
    "cut in the last tensor": (
        file_of({"a": tensor(0, 4), "b": tensor(4, 12)}, 11), "truncated-file", "b"),
    "cut before the data": (file_of({"a": tensor(0, 4)}, 0), "truncated-file", "a"),
    "name with control byte": (file_of({"a\x1b[2J": tensor(0, 4)}, 4), "unsafe-name", "a\x1b[2J"),
    "empty name": (file_of({"": tensor(0, 4)}, 4), "unsafe-name", ""),
    "name with a newline": (file_of({"a\nb": tensor(0, 4)}, 4), "unsafe-name", "a\nb"),
    "lone surrogate": (file_of(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
                       "unsafe-name", "\ud800"),
    "endless name": (file_of({"a" * 600: tensor(0, 4)}, 4), "unsafe-name", "a" * 80),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_broken_header_has_its_own_finding(tmp_path: Path, case: str) -> None:
    data, kind, name = CASES[case]
    header = header_of(tmp_path / "model.safetensors", data)
    assert [(f.kind, f.severity, f.tensor) for f in header.findings] == [(kind, "error", name)]
    assert header.findings[0].file == "model.safetensors"
    assert "\x1b" not in header.findings[0].message


def test_faults_of_several_tensors_are_all_named(tmp_path: Path) -> None:
    good = {"a": tensor(0, 4), "b": tensor(4, 8, [7]), "c": tensor(8, 12, dtype="X")}
    header = header_of(tmp_path / "x.safetensors", file_of(good, 12))
    assert [(f.kind, f.tensor) for f in header.findings] == [("bad-header", "b"), ("dtype", "c")]
    assert [entry.name for entry in header.tensors] == ["a"]


def test_a_million_faults_are_not_a_million_findings(tmp_path: Path) -> None:
    header = header_of(tmp_path / "x.safetensors", file_of({f"t{i}": 1 for i in range(5000)}, 0))
    assert len(header.findings) == 101


def test_a_million_overlaps_are_not_a_million_findings(tmp_path: Path) -> None:
    header = {f"t{i}": tensor(0, 4) for i in range(5000)}
    found = header_of(tmp_path / "x.safetensors", file_of(header, 4)).findings
    assert len(found) == 101
    assert found[0].kind == "offset-overlap"


@pytest.mark.parametrize("text", [b"{}", b"[]", b"0"])
def test_a_header_of_millions_of_values_is_refused_before_it_is_parsed(
    tmp_path: Path, text: bytes
) -> None:
    """3 bytes of JSON become 64 of Python: a header within the limit could ask for gigabytes."""
    data = file_of(b'{"a":[' + b",".join([text] * 3_000_000) + b"]}", 0)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    found = header_of(path, data).findings
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "values; at most 1,000,000" in found[0].message
    assert peak < 2 * len(data)


def test_sound_header_with_padding_and_empty_tensors(tmp_path: Path) -> None:
    layout = {"b": tensor(4, 12), "a": tensor(0, 4), "none": tensor(4, 4, [0, 9])}
    text = json.dumps(layout).encode() + b"   "
    header = header_of(tmp_path / "x.safetensors", file_of(text, 12))
    assert header.findings == ()
    assert {e.name: (e.start - 8 - len(text), e.bytes) for e in header.tensors} == {
        "a": (0, 4), "none": (4, 0), "b": (4, 8)
    }  # fmt: skip
