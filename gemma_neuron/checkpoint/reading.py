"""Opening files of strangers: only regular files inside the folder, never blocking.

In: a path inside a checkpoint folder, or JSON text. Out: a descriptor, parsed JSON.
Refused: links that leave the folder, pipes, devices, loops, doubled JSON keys.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemma_neuron.errors import CheckpointError

MOST_JSON_VALUES = 8_000_000
"""Gemma's tokenizer.json, the largest file read so, has about two million."""
SHARED_MARKER = ".huggingface-shared-blobs"
"""What huggingface_hub 2 marks the folder of blobs with that a cache's repositories share."""


class RefusedFileError(CheckpointError):
    """The file is there but is not one this toolkit opens."""


class BadJsonError(ValueError):
    """Text that is no JSON, with line and column where the parser knows them."""


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


def pread_exactly(handle: int, count: int, offset: int) -> bytes:
    """`count` bytes at `offset`, fewer only where the file ends."""
    pieces = []
    while count > 0:
        piece = os.pread(handle, count, offset)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def parse_json(data: bytes, most_values: int = MOST_JSON_VALUES) -> Any:
    """Strict JSON: UTF-8, no doubled keys, no NaN, bounded values. Raises BadJsonError and nothing else."""
    # Each value but the first follows one of these; texts that hold them make the bound stricter, not laxer.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > most_values:
        raise BadJsonError(f"holds about {values:,} values; at most {most_values:,} are read")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_doubles, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise BadJsonError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise BadJsonError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise BadJsonError("nested too deeply") from error
    except ValueError as error:  # also numbers of thousands of digits
        raise BadJsonError(str(error)) from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJsonError(f"key {double[:100]!r} stands twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise BadJsonError(f"{name} is not JSON")
