"""One unit in a process of its own: its memory is its own figure, and its end frees it.

Everything that crosses is a plain value; the back end is found by name in the worker.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.artifacts import PARTIAL_SUFFIX, digest_json, remove
from gemma_neuron.backends.base import CompileSpec, UnitSpec
from gemma_neuron.backends.registry import backend
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.plan import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs. `known_key`: digest of the committed unit's key, empty when there is none."""

    geometry: ModelGeometry
    plan: ShardPlan
    spec: CompileSpec
    unit: UnitSpec
    folder: Path
    known_key: str
    threads: int


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
    found = backend(job.spec.backend)
    traced = found.trace(job.geometry, job.plan, job.spec, job.unit)
    digest = digest_json(traced.key)
    partial = job.folder.with_name(job.folder.name + PARTIAL_SUFFIX)
    files: tuple[str, ...] = ()
    peak = 0
    if digest != job.known_key:
        remove(partial)
        partial.mkdir(parents=True)
        built = found.compile(traced, partial)
        files, peak = built.files, built.host_peak_bytes
    return Outcome(
        unit=job.unit,
        key=traced.key,
        key_digest=digest,
        files=files,
        partial=partial,
        host_peak_bytes=peak,
        seconds=time.monotonic() - started,
    )
