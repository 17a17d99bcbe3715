"""A hub repository at one commit as a folder: its snapshot in the hub's own cache, completed as needed.

In: names. Out: the files in `models--org--name/snapshots/<commit>`, links and blobs as every other tool of the hub
makes and uses them. Large files come in parts and survive a death; the rest is huggingface_hub's own download.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Literal

from blake3 import blake3
from filelock import FileLock
from huggingface_hub import constants, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from gemma_neuron.checkpoint.hub.problems import Asked, hub_errors, worth_retrying
from gemma_neuron.checkpoint.hub.ranges import USER_AGENT, Ranges
from gemma_neuron.checkpoint.storage import OpenFile
from gemma_neuron.errors import IntegrityError, NetworkError
from gemma_neuron.transfer import (
    PIECE_BYTES,
    Hash,
    Progress,
    Transfer,
    disk_errors,
    retrying,
)

LARGE_BYTES = 8 * 1024 * 1024
"""From this size a file is worth resuming; Gemma's tokenizer.json (33 MB) is one."""


def repository_folder(repo: str) -> Path:
    """The repository's place in the hub cache (HF_HUB_CACHE)."""
    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(
        repo_id=repo, repo_type="model"
    )


class HubFolder:
    """One commit of a repository (a `RemoteFolder`).

    `digests`: name → the hub's digest of the content, which names its blob; of the names that have one.
    `offline` says why nothing can be fetched, if so.
    """

    kind: Literal["hub"] = "hub"

    def __init__(
        self,
        uri: str,
        repo: str,
        revision: str,
        *,
        sizes: Mapping[str, int],
        digests: Mapping[str, str] | None = None,
        offline: str = "",
    ) -> None:
        self.uri, self.repo, self.revision = uri, repo, revision
        self.sizes, self.digests, self.offline = sizes, digests or {}, offline
        self.repository = repository_folder(repo)
        self.folder = self.repository / "snapshots" / revision
        self.ranges = Ranges(repo, revision)

    def missing_bytes(self, name: str) -> int:
        size = self.sizes[name]
        if _has_size(self.folder / name, size):
            return 0
        if name in self.digests and _has_size(self._blob(self.digests[name]), size):
            return 1  # the link
        return max(1, self._transfer(name).missing_bytes())

    def fetch(self, names: Sequence[str], progress: Progress) -> None:
        if self.offline:
            raise NetworkError(
                f"{self.uri} at {self.revision} is not complete in the hub cache ({self.folder}): "
                f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''} missing, and {self.offline}.",
                "Run the same command once with the network (and without HF_HUB_OFFLINE).",
            )
        with (
            hub_errors(Asked(self.repo, self.revision)),
            disk_errors(self.folder, f"Fetching {self.uri}"),
        ):
            for name in names:
                self._drop_damaged(name)
                if LARGE_BYTES <= self.sizes[name] <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                    self._fetch_blob(name, progress)
                else:
                    progress(self.sizes[name])
            for attempt in retrying(worth_retrying):
                with attempt:
                    snapshot_download(
                        self.repo,
                        revision=self.revision,
                        allow_patterns=[escape(name) for name in names],
                        user_agent=USER_AGENT,
                    )

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        yield _RangeFile(self.ranges, name, self.sizes[name])

    def _blob(self, digest: str) -> Path:
        return self.repository / "blobs" / digest

    def _transfer(self, name: str) -> Transfer:
        """Grows beside the blobs, on their file system; the hub's tools pass over folders they do not know."""
        growing = self.repository / ".gemma-neuron" / self.revision / f"{name}.partial"
        return Transfer(size=self.sizes[name], partial=growing, new_hash=blake3)

    def _fetch_blob(self, name: str, progress: Progress) -> None:
        """Put the file's content where snapshot_download finds it, which then only makes the link."""
        digest = self.digests.get(name, "")
        new_hash = _content_hash(digest, self.sizes[name])
        if new_hash is None:
            return None  # no digest to name and check a blob by: the hub's own download asks for it
        lock = self.repository.parent / ".locks" / self.repository.name / f"{digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):  # the hub's own lock of this blob
            if self._blob(digest).exists():
                return progress(self.sizes[name])
            transfer = self._transfer(name)
            transfer.run(partial(self.ranges.stream, name), worth_retrying, progress)
            found = _digest(transfer.partial, new_hash())
            if found != digest:
                transfer.discard()
                raise IntegrityError(
                    f"{name} of {self.uri} came with digest {found}; the hub says {digest}.",
                    "Run the same command again; a proxy or the disk may alter files.",
                )
            transfer.finish(self._blob(digest))
        with contextlib.suppress(OSError):  # others are still growing there
            transfer.partial.parent.rmdir()
            transfer.partial.parent.parent.rmdir()
        return None

    def _drop_damaged(self, name: str) -> None:
        """Remove a snapshot's file of another size, link and blob: the hub's own tools would keep it."""
        path = self.folder / name
        if path.is_symlink() or path.exists():
            blob = path.resolve()
            path.unlink()
            if blob.parent == self.repository.resolve() / "blobs":
                blob.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _RangeFile:
    ranges: Ranges
    name: str
    size: int
    state = None

    def read(self, count: int, offset: int) -> bytes:
        count = max(0, min(count, self.size - offset))
        return self.ranges.read(self.name, offset, count)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _content_hash(digest: str, size: int) -> Callable[[], Hash] | None:
    """What a blob's name is the digest of: SHA-256 for LFS, git's SHA-1 of a header and the content."""
    if re.fullmatch(r"[0-9a-f]{64}", digest):
        return hashlib.sha256
    if re.fullmatch(r"[0-9a-f]{40}", digest):
        return lambda: hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    return None


def _digest(path: Path, hasher: Hash) -> str:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
