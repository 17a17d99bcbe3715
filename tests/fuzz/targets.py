"""What a fuzzer drives: bytes of strangers into headers, indexes, configs and whole audits.

A target takes bytes, puts them where a checkpoint has them, and raises for anything but a finding or a typed error.
`watched` adds the bounds: time, and memory against the size of what was read. Shared by the tests and
`scripts/fuzz-headers`.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gemma_neuron.checkpoint.audit import examine
from gemma_neuron.checkpoint.header import FileHeader, read_header
from gemma_neuron.checkpoint.index import CheckpointIndex
from gemma_neuron.checkpoint.selection import INDEX_NAME, SINGLE_NAME
from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.checkpoint.storage import LocalFiles
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.models.registry import read_config_notes, read_geometry, read_parameter_table
from gemma_neuron.reports import AuditReport, Finding
from tests.real_configs import real_config
from tests.tiny import write_tiny_gemma4

SECONDS = 5.0
"""Of one case, on a busy machine; the usual one takes milliseconds."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """`run` (folder, data) → what came of it, for statistics. `slack`: bytes beyond the input's size.

    Slack is what Python's objects take of the 64 KiB a fuzzer writes at most, and of a config the parameter table of
    as many layers as are read at all.
    """

    run: Callable[[Path, bytes], str]
    slack: int = 8 * MIB


class Broken(AssertionError):
    """A bound or a property that did not hold."""


@dataclass(frozen=True, slots=True)
class Seen:
    outcome: str
    seconds: float
    allocated: int


def watched(name: str, folder: Path, data: bytes) -> Seen:
    """One case within its bounds. Raises Broken, or what the parser let through."""
    target = TARGETS[name]
    tracemalloc.start()
    try:
        started = time.process_time()
        outcome = target.run(folder, data)
        seconds = time.process_time() - started
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if seconds > SECONDS:
        raise Broken(f"{name}: {seconds:.1f} s for {len(data)} bytes")
    if allocated > len(data) + target.slack:
        raise Broken(f"{name}: {allocated:,} bytes were allocated for {len(data):,} bytes of input")
    return Seen(outcome, seconds, allocated)


def file_of(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def check_header(header: FileHeader, size: int) -> str:
    """Entries lie inside the file, apart, and of their size; else findings say why."""
    reached = 0
    for entry in sorted(header.tensors, key=lambda e: (e.start, e.bytes)):
        if entry.start < reached or entry.start + entry.bytes > size:
            raise Broken(f"{entry} of a file of {size} bytes")
        reached = entry.start + entry.bytes
    if any(finding.severity != "error" for finding in header.findings):
        raise Broken(f"a header is judged by errors alone: {header.findings}")
    return _kinds(header.findings)


def _header_of(folder: Path, data: bytes) -> str:
    path = folder / SINGLE_NAME
    path.write_bytes(data)
    with LocalFiles(folder).opened(path.name) as file:
        return check_header(read_header(file, path), len(data))


def _raw(folder: Path, data: bytes) -> str:
    """The whole file."""
    return _header_of(folder, data)


def _header(folder: Path, data: bytes) -> str:
    """A header's text, with a fitting length before it and 40 bytes of data behind."""
    return _header_of(folder, file_of(b"{" + data, bytes(40)))


def _index(folder: Path, data: bytes) -> str:
    """model.safetensors.index.json, beside two small files it may name."""
    source = folder / "index"
    if not source.exists():
        source.mkdir()
        (source / "config.json").write_text("{}")
        for name, tensor in (("a.safetensors", "a"), ("b.safetensors", "b")):
            entry = {tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
            (source / name).write_bytes(file_of(json.dumps(entry).encode(), bytes(4)))
    (source / INDEX_NAME).write_bytes(data)
    found = CheckpointIndex.open(open_source(str(source)))
    if not found.tensors.keys() <= {"a", "b"} or len(found.digest) != 64:
        raise Broken(f"tensors {list(found.tensors)}")
    if not found.findings and found.tensors.keys() != {"a", "b"}:
        raise Broken("an index without findings names both files")
    return _kinds(found.findings)


def _config(folder: Path, data: bytes) -> str:
    """config.json, down to the table of tensors."""
    source = folder / "config"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_bytes(data)
    try:
        from gemma_neuron.checkpoint.source import read_config

        config = read_config(open_source(str(source)))
        geometry = read_geometry(config)
        read_config_notes(config)
        read_parameter_table(geometry)
    except GemmaNeuronError as error:
        return _typed(error)
    return "sound"


def _edits(folder: Path, data: bytes) -> str:
    """A JSON object of edits to a real config's text part: deeper than bytes reach on their own."""
    try:
        edits: Any = json.loads(data)
    except (ValueError, RecursionError):
        return "no edits"
    if not isinstance(edits, dict):
        return "no edits"
    size = ("gemma-4-31B", "gemma-4-E2B", "gemma-3-27b", "gemma-3-270m")[len(data) % 4]
    config = real_config(size)
    config.get("text_config", config).update(edits)
    return _config(folder, json.dumps(config).encode())


@cache
def _sound(folder: Path) -> Path:
    return write_tiny_gemma4(folder / "sound", layers=1, sliding_window=8)


def _prompt(folder: Path, data: bytes) -> str:
    """One of the files around the weights, chosen by the first byte, in a whole audit."""
    names = ("tokenizer_config.json", "generation_config.json", "tokenizer.json")
    return _audited(folder, names[data[0] % 3] if data else names[0], data[1:])


def _weights(folder: Path, data: bytes) -> str:
    """Bytes written over the sound file, by the first of them in its header or anywhere, in a whole audit."""
    raw = bytearray((_sound(folder) / SINGLE_NAME).read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    at = int.from_bytes(data[1:4], "big") % (8 + length if data[:1] > b"\x40" else len(raw))
    raw[at : at + len(data[4:])] = data[4:]
    return _audited(folder, SINGLE_NAME, bytes(raw))


def _audited(folder: Path, name: str, data: bytes) -> str:
    source = folder / "edited"
    if not source.exists():
        shutil.copytree(_sound(folder), source)
    before = (source / name).read_bytes()
    (source / name).write_bytes(data)
    try:
        return _judged(examine(open_source(str(source)), values=True).report)
    except GemmaNeuronError as error:
        return _typed(error)
    finally:
        (source / name).write_bytes(before)


def _judged(report: AuditReport) -> str:
    json.dumps(report.to_json())
    if any(not finding.message for finding in report.findings):
        raise Broken("a finding says nothing")
    return _kinds(report.findings)


def _kinds(findings: Iterable[Finding]) -> str:
    return "+".join(sorted({finding.kind for finding in findings})) or "sound"


def _typed(error: GemmaNeuronError) -> str:
    if error.exit_code != 3 or not error.message:
        raise Broken(f"{type(error).__name__} {error.exit_code}: {error.message!r}")
    return type(error).__name__


TARGETS: dict[str, Target] = {
    "raw": Target(_raw),
    "header": Target(_header),
    "index": Target(_index),
    "config": Target(_config, slack=32 * MIB),
    "edits": Target(_edits, slack=32 * MIB),
    "prompt": Target(_prompt),
    "weights": Target(_weights),
}


def seeds(name: str, folder: Path) -> list[bytes]:
    """Inputs a coverage-guided fuzzer begins with."""
    source = _sound(folder)
    weights = (source / SINGLE_NAME).read_bytes()
    (length,) = struct.unpack_from("<Q", weights)
    weight_map = {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
    }
    found: dict[str, list[bytes]] = {
        "raw": [weights, file_of(b"{}"), b"version https://git-lfs"],
        "header": [
            weights[9 : 8 + length],
            b'"a":{"dtype":"F32","shape":[10],"data_offsets":[0,40]}}',
        ],
        "index": [json.dumps(weight_map).encode()],
        "config": [
            json.dumps(real_config(size)).encode() for size in ("gemma-4-E2B", "gemma-3-4b")
        ],
        "edits": [
            b'{"per_layer_config":{"05":{"head_dim":512}},"global_head_dim":null}',
            b'{"rope_parameters":{"full_attention":{"rope_type":"linear","factor":8}},"num_hidden_layers":6}',
        ],
        "prompt": [
            bytes([i]) + (source / file).read_bytes()[:4096]
            for i, file in enumerate(
                ("tokenizer_config.json", "generation_config.json", "tokenizer.json")
            )
        ],
        "weights": [
            b"\xff" + bytes(3) + weights[:200],
            b"\xff\x00\x00\x08{",
            b"\x00\x00\x10\x00\xff\xff",
        ],
    }
    return found[name]


def limit_memory(extra: int) -> None:
    """No more address space than now and `extra` bytes: a runaway allocation is a MemoryError, not a dead machine."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
