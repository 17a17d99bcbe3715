"""A large file into a bucket, in parts: several at once, and after any death only the missing ones.

In: a file, and a key that names its content. Out: the object. An upload under way is found again by its key, which
holds the digest, so that its parts can only be parts of this content; each is checked by its size and, where the
store's ETags are MD5s, by that. https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread, get_native_id
from typing import Any

from botocore.exceptions import ClientError

from gemma_neuron.artifacts import FileEntry, digest_file
from gemma_neuron.aws import error_code
from gemma_neuron.errors import IntegrityError, NetworkError
from gemma_neuron.mirror.client import worth_retrying
from gemma_neuron.mirror.store import Store
from gemma_neuron.regular_files import FileState
from gemma_neuron.transfer import Progress, retrying

FROM_BYTES = 64 * 1024 * 1024
"""Smaller objects go in one request: less to lose than a part's worth of bookkeeping."""
LEAST_PART = 16 * 1024 * 1024
MOST_PARTS = 9_000
"""S3 takes 10,000."""
MEBIBYTE = 1024 * 1024
WORKERS = 4
"""Parts in memory at once. Four fill a loopback and most networks; more take processor time from the compiler."""
IN_FLIGHT = BoundedSemaphore(WORKERS)
"""Held by each part in memory, of all uploads of this process together."""
COMPILE_AGAIN = "Run `gemma-neuron compile` again with the same arguments."
GONE = ("NoSuchUpload",)
MD5 = re.compile(r'"?([0-9a-f]{32})"?')
Stopped = Callable[[], None]
"""Raises when nothing more is to be sent."""


def part_bytes(size: int) -> int:
    """Of all parts but the last: a function of the size alone, so that another process cuts alike."""
    return max(LEAST_PART, -(-size // MOST_PARTS // MEBIBYTE) * MEBIBYTE)


def send(
    store: Store,
    key: str,
    path: Path,
    entry: FileEntry,
    progress: Progress = lambda _: None,
    check: Stopped = lambda: None,
) -> None:
    """Put a file of any size, once it is known to hold the bytes of `entry`: the key speaks of those, and a name out
    of a bucket must not send another file of this machine there.

    Raises IntegrityError when the file has other bytes or changes meanwhile, NetworkError or AccessError.
    """
    check()
    before = _state_of(path, entry, check)
    if entry.bytes >= FROM_BYTES:
        upload(store, key, path, progress, check)
    else:
        store.put_file(key, path)
        progress(entry.bytes)
    if FileState.of(path) != before:
        store.delete(key)
        raise IntegrityError(
            f"{path} changed while it was uploaded.", "Run the same command when it is at rest."
        )
    store.wrong.discard(key)


def _state_of(path: Path, entry: FileEntry, check: Stopped) -> FileState:
    """The file's state, at which it was found to hold the entry's bytes; hashed by this thread alone."""
    state = FileState.of(path) if path.is_file() else None
    if state is None or state.bytes != entry.bytes:
        raise IntegrityError(
            f"{path} has {'no file' if state is None else f'{state.bytes} bytes'}; its manifest says {entry.bytes}.",
            COMPILE_AGAIN,
        )
    found = digest_file(path, threads=1, between=check)
    if found != entry.blake3:
        raise IntegrityError(
            f"{path} has blake3 {found[:16]}…; its manifest says {entry.blake3[:16]}….",
            COMPILE_AGAIN,
        )
    return state


def upload(store: Store, key: str, path: Path, progress: Progress, check: Stopped) -> None:
    """Put a file of FROM_BYTES or more. Raises IntegrityError when it becomes shorter, NetworkError or AccessError."""
    size = path.stat().st_size
    with store.errors(writing=True):
        job = _Upload(store, key, path, size, progress, check)
        try:
            job.run()
        except ClientError as error:
            # another process of ours may have completed the same content
            if error_code(error) not in GONE or store.size(key) != size:
                raise
    if (arrived := store.size(key)) != size:
        raise NetworkError(
            f"{store.location}/{key}: {arrived} bytes arrived of {size}.",
            "Run the same command again.",
        )


class _Upload:
    def __init__(
        self, store: Store, key: str, path: Path, size: int, progress: Progress, check: Stopped
    ) -> None:
        self.store, self.key, self.path, self.size = store, key, path, size
        self.progress, self.check = progress, check
        self.step, self.lock = part_bytes(size), Lock()
        self.numbers = range(1, -(-size // self.step) + 1)

    def run(self) -> None:
        upload, have = self._begun()
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = self._sent(handle, upload, have)
        finally:
            os.close(handle)
        self.check()
        self.store.client.complete_multipart_upload(
            **self.store.at(self.key), UploadId=upload, MultipartUpload={"Parts": parts}
        )

    def _sent(
        self, handle: int, upload: str, have: dict[int, dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """All parts, WORKERS at once. The threads are daemons, which an executor's are not: one that waits for a store
        that does not answer keeps no process from ending."""
        waiting, parts, failed = (
            iter(self.numbers),
            dict[int, dict[str, Any]](),
            list[BaseException](),
        )

        def work() -> None:
            step_back()
            try:
                while not failed:
                    with self.lock:
                        number = next(waiting, None)
                    if number is None:
                        return
                    parts[number] = self._part(handle, upload, number, have.get(number))
            except BaseException as error:
                failed.append(error)

        count = min(WORKERS, len(self.numbers))
        threads = [Thread(target=work, name="mirror-part", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            failed.append(error)  # the others begin no further part
            raise
        if failed:
            raise failed[0]
        return [parts[number] for number in self.numbers]

    def _begun(self) -> tuple[str, dict[int, dict[str, Any]]]:
        """The upload with most parts of this content, and its parts; others of it are aborted."""
        found = [(upload, self._parts(upload)) for upload in self._uploads()]
        found.sort(key=lambda pair: len(pair[1]), reverse=True)
        for upload, _ in found[1:]:
            self.store.client.abort_multipart_upload(**self.store.at(self.key), UploadId=upload)
        if found:
            return found[0]
        made = self.store.client.create_multipart_upload(**self.store.at(self.key))
        return str(made["UploadId"]), {}

    def _uploads(self) -> list[str]:
        """Uploads of this key that are under way."""
        at = self.store.at(self.key)
        key = at.pop("Key")
        pages = self.store.client.get_paginator("list_multipart_uploads")
        found = self._listed(pages.paginate(**at, Prefix=key), "Uploads")
        return [str(upload["UploadId"]) for upload in found if upload["Key"] == key]

    def _parts(self, upload: str) -> dict[int, dict[str, Any]]:
        """Number → part, of those an upload has."""
        pages = self.store.client.get_paginator("list_parts")
        listed = self._listed(pages.paginate(**self.store.at(self.key), UploadId=upload), "Parts")
        return {part["PartNumber"]: part for part in listed}

    @staticmethod
    def _listed(pages: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """All of a listing; none where the store has no such upload, as some say of a bucket without any."""
        try:
            return [found for page in pages for found in page.get(name, [])]
        except ClientError as error:
            if error_code(error) in GONE:
                return []
            raise

    def _length(self, number: int) -> int:
        return min(self.step, self.size - (number - 1) * self.step)

    def _read(self, handle: int, number: int) -> bytes:
        length = self._length(number)
        data = os.pread(handle, length, (number - 1) * self.step)
        if len(data) != length:
            raise IntegrityError(f"{self.path} became shorter while it was uploaded.")
        return data

    def _is_sent(self, handle: int, number: int, have: dict[str, Any]) -> bool:
        with IN_FLIGHT:
            return have["Size"] == self._length(number) and _is_of(
                have["ETag"], self._read(handle, number)
            )

    def _part(
        self, handle: int, upload: str, number: int, have: dict[str, Any] | None
    ) -> dict[str, Any]:
        self.check()
        if have is None or not self._is_sent(handle, number, have):
            for attempt in retrying(worth_retrying):
                with attempt:
                    self.check()  # outside: it may wait for others, which need a place
                    with IN_FLIGHT:
                        have = self.store.client.upload_part(
                            **self.store.at(self.key),
                            UploadId=upload,
                            PartNumber=number,
                            Body=self._read(handle, number),
                        )
        assert have is not None
        with self.lock:
            self.progress(self._length(number))
        sums = {name: value for name, value in have.items() if name.startswith("Checksum")}
        sums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": have["ETag"], **sums}


def _is_of(etag: str, data: bytes) -> bool:
    """Whether a part's ETag fits its bytes; one that is no MD5 (KMS, other stores) says nothing."""
    found = MD5.fullmatch(etag)
    return found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1]


def step_back() -> None:
    """This thread yields to the compiler (Linux has a niceness per thread)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)
