"""One unit in a process of its own: its memory is its own figure, and its end frees it.

Everything that crosses is a plain value; the back end is found by name in the worker.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.artifacts import PARTIAL_SUFFIX, digest_json, remove, write_atomic
from gemma_neuron.backends.base import Limits, PortPart, UnitSpec
from gemma_neuron.backends.registry import backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs. `known_key`: digest of the committed unit's key, empty when there is none.

    `dry`: trace only, and write what the compiler would be given into that folder.
    """

    part: PortPart
    known_key: str
    threads: int
    limits: Limits
    dry: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`files` is empty when the traced key equals the committed one: nothing had to be built."""

    unit: UnitSpec
    key: dict[str, str]
    key_digest: str
    files: tuple[str, ...]
    partial: Path
    host_peak_bytes: int
    seconds: float


def run(job: Job) -> Outcome:
    """Trace; compile beside the unit's folder unless its key is known. Raises CompileError."""
    started = time.monotonic()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(job.threads)
    part = job.part
    found = backend(part.spec.backend)
    traced = found.trace(part)
    digest = digest_json(traced.key)
    folder = part.port.unit_folder(part.unit)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    files: tuple[str, ...] = ()
    peak = 0
    if job.dry is not None:
        files = _write_dry(job.dry, traced.dry_files())
    elif digest != job.known_key:
        remove(partial)
        partial.mkdir(parents=True)
        built = found.compile(traced, partial, job.limits)
        files, peak = built.files, built.host_peak_bytes
    return Outcome(
        unit=part.unit,
        key=traced.key,
        key_digest=digest,
        files=files,
        partial=partial,
        host_peak_bytes=peak,
        seconds=time.monotonic() - started,
    )


def _write_dry(folder: Path, files: dict[str, bytes]) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomic(folder / name, data)
    return tuple(files)
