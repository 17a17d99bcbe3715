"""A unit compiled on a machine that has nothing of the port but what is in its mirror: the worker's side.

In: where the port lies in the bucket, a job. Out: the unit's files in the bucket by content, and what they are. They
count only once the controller has committed them; what a worker that died has put there is nobody's.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import TypeVar

import psutil

from gemma_neuron.artifacts import FileEntry, digest_file, remove
from gemma_neuron.backends.base import Backend
from gemma_neuron.backends.registry import backend
from gemma_neuron.compilation import worker
from gemma_neuron.elastic.alike import require_alike
from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.errors import IntegrityError, NetworkError
from gemma_neuron.mirror.folder import cache_folder
from gemma_neuron.mirror.layout import SetName, blob_key
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.parts import send
from gemma_neuron.mirror.pull import Puller
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import Port

PATIENCE_SECONDS = 600.0
"""For a store that is away: a unit that took an hour is not given up for it."""
LONGEST_WAIT = 10.0
Answer = TypeVar("Answer")
LOG_BYTES = 65536
"""Of each log's end, sent home with what failed."""


@dataclass(frozen=True, slots=True)
class Made:
    """`result` as on the worker's machine; `entries`: its files, in the bucket by their content."""

    result: worker.UnitResult
    entries: tuple[FileEntry, ...]


def compile_away(
    location: S3Location, bucket_owner: str, context: WorkerContext, job: worker.Job
) -> Made:
    """Run in a worker. Raises CompileError, EnvironmentProblem where this machine would compile something else than the
    controller's, and NetworkError when the store stays away."""
    found = backend(job.part.spec.backend)
    found.require()
    store = Store(location, bucket_owner)
    with _folder(store, job.name) as folder:
        part = replace(job.part, port=Port(folder))
        here = replace(job, part=part)
        persistently(context, "fetching", lambda: fetch_inputs(store, found, here))
        require_same(found.shortcut_key(part), job)
        try:
            result = worker.run(context, here)
        except Exception as error:
            for log in sorted(folder.rglob(f"*{worker.LOG_SUFFIX}")):
                error.add_note(f"--- {log.name} on {platform.node()}\n{_end_of(log)}")
            raise
        entries = tuple(_entry(result.partial / name) for name in result.files)
        persistently(context, "uploading", lambda: _put(store, result.partial, entries))
    return Made(result, entries)


@contextmanager
def _folder(store: Store, unit: str) -> Iterator[Path]:
    """A folder of this process alone; those that killed ones of this machine left are removed (another's may lie there
    too, where home folders are shared)."""
    base = cache_folder(store.location, store.client.meta.endpoint_url) / "units"
    base.mkdir(parents=True, exist_ok=True)
    node = platform.node()
    for left in base.glob(f"*.{escape(node)}.*"):
        if left.suffix[1:].isdigit() and not psutil.pid_exists(int(left.suffix[1:])):
            remove(left)
    own = base / f"{unit}.{node}.{os.getpid()}"
    own.mkdir()
    try:
        yield own
    finally:
        remove(own)


def fetch_inputs(store: Store, found: Backend, job: worker.Job) -> None:
    """The units that this one reads. Raises IntegrityError when one is not whole in the bucket."""
    names = [SetName.of_unit(unit) for unit in found.inputs(job.part)]
    pulled = Puller(store, job.part.port.path).pull(names, lambda _: None)
    if pulled.bad:
        name, why = next(iter(pulled.bad.items()))
        raise IntegrityError(f"{job.name} needs {name}, which cannot be had: {why}")


def require_same(here: dict[str, str], job: worker.Job) -> None:
    """What this machine would compile is what the controller's would: same code, versions, compiler, processor."""
    otherwise = f"{job.name} would be another on {platform.node()} than on the controller's machine"
    require_alike(otherwise, here, job.shortcut_key)


def _entry(path: Path) -> FileEntry:
    return FileEntry(name=path.name, bytes=path.stat().st_size, blake3=digest_file(path))


def _put(store: Store, folder: Path, entries: tuple[FileEntry, ...]) -> None:
    for entry in entries:
        key = blob_key(entry.blake3)
        if not store.has(key, entry.bytes):
            send(store, key, folder / entry.name, entry)


def persistently(context: WorkerContext, doing: str, act: Callable[[], Answer]) -> Answer:
    """Try on while a store is away, for PATIENCE_SECONDS."""
    end = time.monotonic() + PATIENCE_SECONDS
    context.phase(doing)
    while True:
        try:
            return act()
        except NetworkError:
            if time.monotonic() > end:
                raise
        context.phase(f"{doing}, the store is away")
        time.sleep(random.uniform(0.5, 1.0) * LONGEST_WAIT)


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return file.read().decode(errors="replace").strip()
