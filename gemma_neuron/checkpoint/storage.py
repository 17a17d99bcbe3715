"""The files of one checkpoint, wherever they lie: names, and ranges of bytes.

In: a folder, or something remote that answers ranges. Out: `FileStore`, which every reader here works on, so
that a folder and a repository that was never downloaded are judged by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gemma_neuron.checkpoint.reading import pread_exactly
from gemma_neuron.regular_files import FileState, RefusedFileError, opened
from gemma_neuron.strict_json import BadJsonError, parse_json


class OpenFile(Protocol):
    """One file, open for reading."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def state(self) -> FileState | None:
        """As the file is now; None of one that is read across the network."""

    def read(self, count: int, offset: int) -> bytes:
        """`count` bytes at `offset`, fewer only where the file ends."""


class FileStore(Protocol):
    """A checkpoint's files, flat: names have no folder part."""

    @property
    def remote(self) -> bool:
        """Whether a read may cross the network, so that readers ask for few and small ranges."""

    def names(self) -> tuple[str, ...]:
        """Names of what is there, sorted."""

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open one file. Raises FileNotFoundError, RefusedFileError or OSError."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """An open descriptor and the file's size."""

    handle: int
    size: int

    @property
    def state(self) -> FileState:
        return FileState.of(self.handle)

    def read(self, count: int, offset: int) -> bytes:
        return pread_exactly(self.handle, count, offset)


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """A folder: only regular files inside it are opened (`regular_files.opened`)."""

    folder: Path
    remote = False

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self.folder.iterdir()))

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        with opened(self.folder / name, self.folder) as (handle, size):
            yield LocalFile(handle, size)


def read_small(files: FileStore, name: str, limit: int) -> bytes:
    """All bytes of a file of at most `limit`; FileNotFoundError, RefusedFileError otherwise."""
    with files.opened(name) as file:
        if file.size > limit:
            raise RefusedFileError(f"{name} has {file.size:,} bytes; at most {limit:,} are read.")
        return file.read(file.size, 0)


def read_json_object(files: FileStore, name: str, limit: int) -> dict[str, Any]:
    """A JSON object from a file; BadJsonError, RefusedFileError or FileNotFoundError otherwise."""
    value = parse_json(read_small(files, name, limit))
    if not isinstance(value, dict):
        raise BadJsonError(f"holds a JSON {type(value).__name__}, not an object")
    return value
