"""One process at a time in an output folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemma_neuron.errors import UsageError


@contextmanager
def locked(folder: Path, lock_name: str) -> Iterator[None]:
    """Make `folder` if needed and hold it. Raises UsageError when another process does, or it cannot be written."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / lock_name)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(
            f"Another process works on {folder}.", "Wait for it, or name another --out."
        ) from error
    except OSError as error:
        why = error.strerror or error
        if folder.is_symlink() and not folder.exists():
            why = f"it is a link to {folder.readlink()}, which is not there"
        raise UsageError(
            f"--out {folder} cannot be written: {why}.", "Name another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()
