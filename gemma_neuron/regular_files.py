"""Opening files of strangers: only regular files inside the folder, never blocking; and what tells a file from another.

In: a path inside a checkpoint folder. Out: a descriptor, a `FileState`.
Refused: links that leave the folder, pipes, devices, loops.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.errors import CheckpointError, SourceChangedError

SHARED_MARKER = ".huggingface-shared-blobs"
"""What huggingface_hub 2 marks the folder of blobs with that a cache's repositories share."""
VANISHED = "it cannot be found any more"


class RefusedFileError(CheckpointError):
    """The file is there but is not one this toolkit opens."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file's bytes do, or another file takes its place.

    A writer can put the modification time back (`touch -r`, `rsync -t`), but not that of the last status change, which
    the kernel alone sets (inode(7)).
    """

    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """Of a path, links followed, or of a descriptor. Raises OSError."""
        found = os.fstat(file) if isinstance(file, int) else file.stat()
        times = found.st_mtime_ns, found.st_ctime_ns
        return cls(found.st_size, *times, found.st_ino, found.st_dev)


def require_same(path: Path, before: FileState, now: FileState) -> None:
    """Raise SourceChangedError saying what differs when the file is no longer that of `before`."""
    how = how_changed(before, now)
    if how is not None:
        raise changed(path, how)


def how_changed(before: FileState, now: FileState) -> str | None:
    """In words; None when it is the same file."""
    if before == now:
        return None
    if before.bytes != now.bytes:
        return f"it had {before.bytes:,} bytes and has {now.bytes:,}"
    if (before.inode, before.device) != (now.inode, now.device):
        return "another file has taken its place"
    if before.mtime_ns != now.mtime_ns:
        return "it was written to"
    return "it was written to and its time put back, or its rights, owner or links were changed"


def changed(path: Path, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{path} changed while this ran: {how}.",
        "Restore the checkpoint and run the same command again; committed ranks stay.",
    )


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Where a link inside `folder` may end: the folder, and a hub snapshot's own blobs.

    The hub cache is `models--org--name/snapshots/<commit>/<file>` → `../../blobs/<digest>`, which may itself be a
    link into the cache's `blobs/` that all repositories share.
    """
    real = Path(os.path.realpath(folder))
    if real.parent.name != "snapshots":
        return (real,)
    repository = real.parent.parent
    shared = repository.parent / "blobs"
    if repository.name.startswith("models--") and (shared / SHARED_MARKER).is_file():
        return real, repository / "blobs", shared
    return real, repository / "blobs"


@contextmanager
def still_opened(path: Path, folder: Path, state: FileState) -> Iterator[int]:
    """Descriptor of the file that `path` named when its `state` was taken. Raises SourceChangedError."""
    with ExitStack() as stack:
        try:
            handle, _ = stack.enter_context(opened(path, folder))
        except FileNotFoundError as error:
            raise changed(path, VANISHED) from error
        except RefusedFileError as error:
            raise changed(path, error.message.rstrip(".")) from error
        require_same(path, state, FileState.of(handle))
        yield handle


@contextmanager
def opened(path: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file. Raises FileNotFoundError or RefusedFileError.

    The link is resolved once and the result opened without following another and without waiting
    for a writer, so that neither a pipe nor a swap of the file can hold or mislead the reader.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RefusedFileError(f"{path.name} cannot be resolved: {error}.") from error
    if not any(real.is_relative_to(root) for root in allowed_roots(folder)):
        raise RefusedFileError(
            f"{path.name} is a link to {real}, outside the checkpoint folder.",
            "Copy the file into the folder.",
        )
    _require_regular(path.name, real.stat().st_mode)
    try:
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RefusedFileError(f"{path.name} cannot be opened: {error.strerror}.") from error
    try:
        found = os.fstat(handle)
        _require_regular(path.name, found.st_mode)
        yield handle, found.st_size
    finally:
        os.close(handle)


def _require_regular(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = {
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFSOCK: "a socket",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }.get(stat.S_IFMT(mode), "no regular file")
        raise RefusedFileError(f"{name} is {kind}; a regular file is needed.")
