"""The commit protocol: what has no marker does not exist; what has one is checked before use.

A committed thing is a set of files in one folder under a stem: `<stem>.manifest.json` names each file with
its bytes and blake3 digest, and `<stem>.committed`, written last, holds the manifest's own digest.
Order: files beside their final names, fsync, rename, manifest, fsync of the folder, marker, fsync.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
)

from gemma_neuron.errors import DiskFullError, EnvironmentProblem, IntegrityError
from gemma_neuron.names import is_plain_file_name

CHUNK_BYTES = 8 * 1024 * 1024
PARTIAL_SUFFIX = ".partial"
LOG_SUFFIX = ".parts"
"""Of the log of a download's finished parts, after the name of the growing file."""
PARTIAL_SUFFIXES = PARTIAL_SUFFIX, PARTIAL_SUFFIX + LOG_SUFFIX


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _plain_name(name: str) -> str:
    """A manifest may come from a bucket: what it names is written to and read from."""
    if not is_plain_file_name(name):
        raise ValueError("is no plain file name")
    return name


PlainName = Annotated[str, AfterValidator(_plain_name)]


class FileEntry(BaseModel):
    """One file of a committed set; `name` is a plain name inside the set's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: PlainName
    bytes: NonNegativeInt
    blake3: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a committed set holds; `facts` is the stage's own record (keys, sizes, times)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileEntry, ...]
    facts: dict[str, Any] = {}


def digest_bytes(data: bytes) -> str:
    return blake3(data).hexdigest()


def digest_json(value: object) -> str:
    """Digest of a value's canonical JSON text (sorted keys, no spaces)."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def digest_file(
    path: Path, *, threads: int = blake3.AUTO, between: Callable[[], None] = lambda: None
) -> str:
    """blake3 of a file's bytes, read in bounded pieces and hashed on all cores, or by `threads`.

    `between`: called between two pieces; what it raises ends the reading.
    """
    hasher = blake3(max_threads=threads)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        room = memoryview(bytearray(min(CHUNK_BYTES, max(1, path.stat().st_size))))
        while count := file.readinto(room):
            hasher.update(room[:count])
            between()
    return hasher.hexdigest()


@cache
def source_digest(*names: str) -> str:
    """Digest of our own Python files `names` (below the package; a folder stands for all it holds)."""
    root = Path(__file__).parent
    files: list[Path] = []
    for name in names:
        path = root / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return digest_json({str(f.relative_to(root)): digest_bytes(f.read_bytes()) for f in files})


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename or a new name in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, fsync, rename, fsync the folder: `path` is the old bytes or the new, never part.

    Raises IntegrityError where a folder is in the way, DiskFullError, or OSError.
    """
    require_no_folder(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in FULL:
            raise
        partial.unlink(missing_ok=True)
        raise writing_failed(path, error) from error


def require_no_folder(path: Path) -> None:
    """Raise IntegrityError when a folder lies where a file is to be written."""
    if path.is_dir():
        raise IntegrityError(
            f"{path} is a folder; a file belongs there.",
            f"Move {path} away and run the same command again.",
        )


def free_bytes(folder: Path) -> int:
    """What is free where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def writing_failed(path: Path, error: OSError) -> EnvironmentProblem:
    """What the user needs to know of an OSError of writing `path`: where, why, and what is free."""
    kind = DiskFullError if error.errno in FULL else EnvironmentProblem
    free = free_bytes(path if path.is_dir() else path.parent)
    cure = "Free some room (or raise the quota or file size limit)"
    return kind(
        f"Writing {path} failed: {error.strerror or error}; {free:,} bytes are free there.",
        f"{cure if error.errno in FULL else 'Check the path, its rights and the disk'} and run the same command: it "
        "goes on, and what is committed stays.",
    )


def json_bytes(value: object) -> bytes:
    """The text of the toolkit's JSON files."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json_atomic(path: Path, value: object) -> None:
    write_atomic(path, json_bytes(value))


def append_json_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON line with its time, fsynced."""
    text = json.dumps({"time": round(time.time(), 3), **line}, sort_keys=True) + "\n"
    with path.open("ab+") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")  # a line torn by a crash stays alone
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def json_lines(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; what a crash or an editor left that is none is passed over.

    `last_bytes`: only the whole lines in that much of its end.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(file.seek(0, os.SEEK_END) - last_bytes, 0)
        file.seek(start)
        if start:
            file.readline()
        found_lines = file.read().decode("utf-8", errors="replace").splitlines()
    lines = []
    for text in found_lines:
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            lines.append(found)
    return lines


def remove_partials(folder: Path, *, spare: Collection[str] = ()) -> list[str]:
    """Remove what an interrupted write left in `folder` itself, file or folder, but for `spare`; the names removed."""
    if not folder.is_dir():
        return []
    found = {path.name for end in PARTIAL_SUFFIXES for path in folder.glob("*" + end)}
    names = sorted(found.difference(spare))
    for name in names:
        remove(folder / name)
    return names


def begun_transfers(folder: Path) -> set[str]:
    """Names of downloads in `folder` that can be gone on with, and of the logs of their parts."""
    logs = folder.glob("*" + PARTIAL_SUFFIX + LOG_SUFFIX) if folder.is_dir() else ()
    pairs = [(log.name, log.name.removesuffix(LOG_SUFFIX)) for log in logs]
    return {name for pair in pairs if (folder / pair[1]).is_file() for name in pair}


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class CommittedSet:
    """A set of files under `folder` that counts only with its marker."""

    folder: Path
    stem: str

    @property
    def manifest_path(self) -> Path:
        return self.folder / f"{self.stem}.manifest.json"

    @property
    def marker_path(self) -> Path:
        return self.folder / f"{self.stem}.committed"

    def manifest(self) -> Manifest | None:
        """The manifest, or None when the set was never committed.

        Raises IntegrityError when the marker is there and the manifest is not what it vouches for.
        """
        if not self.marker_path.is_file():
            return None
        try:
            # A pipe there would never end.
            data = self.manifest_path.read_bytes() if self.manifest_path.is_file() else b""
            manifest = Manifest.model_validate_json(data)
        except (OSError, ValidationError) as error:
            raise IntegrityError(
                f"{self.manifest_path} cannot be read though its marker is there: {error}",
                f"Remove {self.folder}, then run the command that made it: it is built again.",
            ) from error
        if digest_bytes(data).encode() != self.marker_path.read_bytes().strip():
            raise IntegrityError(
                f"{self.manifest_path} does not have the digest its marker names.",
                f"Remove {self.folder}, then run the command that made it: it is built again.",
            )
        return manifest

    def commit(self, names: Iterable[str], facts: dict[str, Any] | None = None) -> Manifest:
        """Make the files `names` (already at their final names and fsynced) count."""
        entries = tuple(
            FileEntry(
                name=name,
                bytes=(self.folder / name).stat().st_size,
                blake3=digest_file(self.folder / name),
            )
            for name in names
        )
        return self.commit_entries(entries, facts)

    def commit_entries(
        self, entries: tuple[FileEntry, ...], facts: dict[str, Any] | None = None
    ) -> Manifest:
        """As `commit`, for files whose digests were taken while they were written."""
        manifest = Manifest(files=entries, facts=facts or {})
        data = manifest.model_dump_json(indent=1).encode()
        write_atomic(self.manifest_path, data)
        write_atomic(self.marker_path, (digest_bytes(data) + "\n").encode())
        return manifest

    def verify(self) -> Manifest:
        """The manifest, after every file's size and digest were found as it says.

        Raises IntegrityError naming the first file that differs, and both digests.
        """
        manifest = self.manifest()
        if manifest is None:
            raise IntegrityError(
                f"{self.folder / self.stem} is not committed: its marker is missing.",
                "Run `gemma-neuron compile` again with the same arguments.",
            )
        for entry in manifest.files:
            path = self.folder / entry.name
            found = path.stat().st_size if path.is_file() else None
            if found != entry.bytes or digest_file(path) != entry.blake3:
                size = "no file" if found is None else f"{found} bytes"
                raise IntegrityError(
                    f"{path}: found {size} with another digest than the manifest's "
                    f"{entry.bytes} bytes, blake3 {entry.blake3[:16]}….",
                    f"Remove {self.marker_path}, then run the command that made it: it is built again.",
                )
        return manifest

    def withdraw(self) -> None:
        """Take the marker away first, then the manifest: the set no longer exists."""
        self.marker_path.unlink(missing_ok=True)
        self.manifest_path.unlink(missing_ok=True)
