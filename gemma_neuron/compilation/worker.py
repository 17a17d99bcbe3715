"""One unit in a process of its own: its memory is its own figure, and its end frees it.

Everything that crosses is a plain value; the back end is found by name in the worker.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gemma_neuron.artifacts import PARTIAL_SUFFIX, digest_json, remove, write_atomic
from gemma_neuron.backends.base import Limits, PortPart, UnitSpec
from gemma_neuron.backends.registry import backend
from gemma_neuron.elastic.engine import WorkerContext

LOG_SUFFIX = ".log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs. `known_key`: digest of the committed unit's key, empty when there is none.

    `dry`: trace only, and write what the compiler would be given into that folder. `shortcut_key`: the unit's, as the
    controller's machine has it.
    """

    part: PortPart
    known_key: str
    threads: int
    limits: Limits
    dry: Path | None = None
    shortcut_key: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.part.unit.name

    @property
    def log(self) -> Path:
        """What the worker and its compilers print, over all tries; beside the unit's folder, gone with success."""
        folder = self.part.port.unit_folder(self.part.unit) if self.dry is None else self.dry
        return folder.with_name(folder.name + LOG_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """`files` is empty when the traced key equals the committed one: nothing had to be built."""

    unit: UnitSpec
    key: dict[str, str]
    key_digest: str
    files: tuple[str, ...]
    partial: Path
    host_peak_bytes: int
    seconds: float


def run(context: WorkerContext, job: Job) -> UnitResult:
    """Trace; compile beside the unit's folder unless its key is known. Raises CompileError."""
    started = time.monotonic()
    _print_into(job.log)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(job.threads)
    part = job.part
    found = backend(part.spec.backend)
    context.phase("tracing", job.limits.silence_seconds)
    traced = found.trace(part)
    digest = digest_json(traced.key)
    partial = partial_folder(part)
    files: tuple[str, ...] = ()
    peak = 0
    if job.dry is not None:
        files = _write_dry(job.dry, traced.dry_files())
    elif digest != job.known_key:
        remove(partial)
        partial.mkdir(parents=True)
        context.phase("compiling", job.limits.silence_seconds)
        built = found.compile(traced, partial, job.limits)
        files, peak = built.files, built.host_peak_bytes
    return UnitResult(
        unit=part.unit,
        key=traced.key,
        key_digest=digest,
        files=files,
        partial=partial,
        host_peak_bytes=peak,
        seconds=time.monotonic() - started,
    )


def partial_folder(part: PortPart) -> Path:
    """Where a unit's files lie until it is published: beside its folder."""
    folder = part.port.unit_folder(part.unit)
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def _print_into(log: Path) -> None:
    """Let this process and all it starts print into `log`, a crash's stacks included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, f"--- pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    faulthandler.enable(sys.__stderr__ or 2)


def _write_dry(folder: Path, files: dict[str, bytes]) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomic(folder / name, data)
    return tuple(files)
