"""The files under an S3 prefix as a folder: read by ranges, or downloaded in parts into a cache folder.

In: an s3:// URI. Out: `S3Folder`, in the state its listing found: every read names the ETag, so that an object
replaced meanwhile is an error and not a mixture. A download is checked against the ETag where that is a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from platformdirs import user_cache_path

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.errors import IntegrityError, SourceNotFoundError
from gemma_neuron.mirror.client import s3_errors, worth_retrying
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.store import Store
from gemma_neuron.transfer import (
    PIECE_BYTES,
    WORKERS,
    Progress,
    Transfer,
    all_of,
    disk_errors,
    retrying,
)

CACHE_VARIABLE = "GEMMA_NEURON_CACHE"
STATE_NAME = ".fetched.json"
MOST_OBJECTS = 10_000
"""Directly under a prefix; a checkpoint has tens."""
SIMPLE_ETAG = re.compile(r"[0-9a-f]{32}")
PARTS_ETAG = re.compile(r"([0-9a-f]{32})-(\d{1,5})")


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as listed; `etag` without its quotes."""

    size: int
    etag: str


class S3Folder:
    """The objects directly under a prefix, and the cache folder of this prefix."""

    kind: Literal["s3"] = "s3"
    revision = ""

    def __init__(self, uri: str, tell: Callable[[str], None]) -> None:
        """List the prefix. Raises UsageError, SourceNotFoundError, AccessError or NetworkError."""
        self.uri, self.tell = uri, tell
        self.location = S3Location.parse(uri)
        self.store = Store(self.location)
        with s3_errors(uri, self.location.bucket):
            self.objects = self._list()
        if not self.objects:
            raise SourceNotFoundError(
                f"There is no object directly under {self.location}/.", "Check the prefix."
            )
        self.folder = cache_folder(self.location, self.store.client.meta.endpoint_url)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: found.size for name, found in self.objects.items()}

    def missing_bytes(self, name: str) -> int:
        found = self.objects[name]
        if self._fetched().get(name) == found.etag and _size(self.folder / name) == found.size:
            return 0
        return max(1, self._transfer(name).missing_bytes())

    def fetch(self, names: Sequence[str], progress: Progress) -> None:
        what = f"Fetching {self.uri}"
        with s3_errors(self.uri, self.location.bucket), disk_errors(self.folder, what):
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                for name in names:
                    if self.missing_bytes(name):
                        self._fetch(name, progress)

    @contextmanager
    def opened(self, name: str) -> Iterator[_RangeFile]:
        yield _RangeFile(self, name, self.objects[name].size)

    def stream(self, name: str, offset: int, count: int) -> Iterator[bytes]:
        """The bytes of a range of the object as it was listed, in pieces."""
        return self.store.stream(name, offset, count, f'"{self.objects[name].etag}"')

    def _list(self) -> dict[str, S3Object]:
        prefix = self.location.key("")
        pages = self.store.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.location.bucket, Prefix=prefix, Delimiter="/"
        )
        objects = {}
        for page in pages:
            for found in page.get("Contents", []):
                if found["Key"] != prefix:
                    name = found["Key"][len(prefix) :]
                    objects[name] = S3Object(found["Size"], found["ETag"].strip('"'))
            if len(objects) > MOST_OBJECTS:
                raise SourceNotFoundError(
                    f"{self.location}/ holds more than {MOST_OBJECTS:,} objects: it is no checkpoint.",
                    "Name the prefix that holds config.json.",
                )
        return objects

    def _transfer(self, name: str) -> Transfer:
        found = self.objects[name]
        content = hashlib.sha256(found.etag.encode()).hexdigest()[:16]
        growing = self.folder / ".partial" / f"{name}.{content}"
        return Transfer(
            size=found.size,
            partial=growing,
            new_hash=lambda: hashlib.md5(usedforsecurity=False),
        )

    def _fetch(self, name: str, progress: Progress) -> None:
        found = self.objects[name]
        transfer = self._transfer(name)
        digests = transfer.run(
            lambda at, count: self.stream(name, at, count), worth_retrying, progress
        )
        expected, came = self._digests(name, transfer, digests)
        if not expected:
            self.tell(
                f"warning: the ETag of {name} is no MD5 (encrypted by KMS, or another kind of store); of the "
                "download only the size was checked"
            )
        if expected != came:
            transfer.discard()
            raise IntegrityError(
                f"{self.uri}: {name} came with MD5 {came}; its ETag says {expected}.",
                "Run the same command again; a proxy or the disk may alter files.",
            )
        transfer.finish(self.folder / name)
        write_json_atomic(self.folder / STATE_NAME, self._fetched() | {name: found.etag})

    def _digests(self, name: str, transfer: Transfer, digests: list[str]) -> tuple[str, str]:
        """(what the ETag says, what came); both empty where the ETag is no MD5 (KMS, other stores).

        https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html: MD5 of a plain upload; of one in parts
        the MD5 of the parts' MD5s and their number.
        """
        head = self.store.client.head_object(**self.store.at(name), PartNumber=1)
        etag = self.objects[name].etag
        if str(head.get("ServerSideEncryption", "")).startswith("aws:kms"):
            return "", ""
        if SIMPLE_ETAG.fullmatch(etag):
            return etag, _md5_of_ranges(transfer.partial, transfer.size, transfer.size)[0]
        parts = PARTS_ETAG.fullmatch(etag)
        first = int(head.get("ContentLength", 0))
        if parts is None or not first or -(-transfer.size // first) != int(parts[2]):
            return "", ""  # parts of unequal sizes, or a store with ETags of its own
        if first != transfer.part_bytes:
            digests = _md5_of_ranges(transfer.partial, transfer.size, first)
        joined = hashlib.md5(b"".join(map(bytes.fromhex, digests)), usedforsecurity=False)
        return etag, f"{joined.hexdigest()}-{len(digests)}"

    def _fetched(self) -> dict[str, Any]:
        """Name → ETag of what lies in the folder; empty before the first download."""
        try:
            found = json.loads((self.folder / STATE_NAME).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class _RangeFile:
    source: S3Folder
    name: str
    size: int
    state = None

    def read(self, count: int, offset: int) -> bytes:
        count = max(0, min(count, self.size - offset))
        data = b""
        with s3_errors(self.source.uri, self.source.location.bucket):
            for attempt in retrying(worth_retrying):
                with attempt:
                    data = b"".join(self.source.stream(self.name, offset, count)) if count else b""
        return data


def cache_folder(location: S3Location, endpoint: str) -> Path:
    """Where a prefix is downloaded to: under GEMMA_NEURON_CACHE, else the user's cache folder."""
    root = os.environ.get(CACHE_VARIABLE)
    base = Path(root).expanduser() if root else user_cache_path("gemma-neuron")
    named = hashlib.sha256(f"{endpoint}\n{location}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", location.prefix)[-80:].strip("-.")
    return base / "s3" / location.bucket / f"{readable or 'root'}-{named}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _md5_of_ranges(path: Path, size: int, step: int) -> list[str]:
    """MD5 of each stretch of `step` bytes, several at a time: hashing lets other threads run."""

    def digest(start: int) -> str:
        hasher, left = hashlib.md5(usedforsecurity=False), min(step, size - start)
        with path.open("rb") as file:
            file.seek(start)
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                hasher.update(piece)
                left -= len(piece)
        return hasher.hexdigest()

    return all_of(digest, range(0, max(size, 1), max(step, 1)), WORKERS)
