"""Objects of one prefix: small ones read and written under conditions, large ones read by ranges.

In: a location. Out: bytes with their ETag and age. A condition (`If-None-Match: *`, `If-Match`) lets one of two
writers win: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from gemma_neuron.aws import error_code
from gemma_neuron.errors import AccessError
from gemma_neuron.mirror.client import not_implemented, s3_client, s3_errors, worth_retrying
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.transfer import CutShortError, retrying

PIECE_BYTES = 128 * 1024
"""Read from a connection at once: what is lost when it is cut in between."""
SMALL_LIMIT = 16 * 1024 * 1024
"""Of an object that is read whole: manifests, markers, records."""
ONE_REQUEST = TransferConfig(multipart_threshold=128 * 1024 * 1024, use_threads=False)
"""Files that are larger than a request go through `parts`."""
MISSING = ("404", "NoSuchKey")
MOVED = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")


@dataclass(frozen=True, slots=True)
class Stored:
    """A small object as it was read. `age_seconds`: by the store's own clock, to a second."""

    data: bytes
    etag: str
    age_seconds: float


class MovedError(Exception):
    """The object is no longer in the state a condition named; `found` is what it is now, None if it is gone."""

    def __init__(self, found: Stored | None) -> None:
        super().__init__("the object was changed by another writer")
        self.found = found


class Store:
    """The objects under a location. Keys are relative to it.

    `bucket_owner`: AWS account that must own the bucket, sent with each request.
    Methods raise AccessError or NetworkError when the store cannot be asked.
    """

    def __init__(self, location: S3Location, bucket_owner: str = "") -> None:
        self.location = location
        self.wrong: set[str] = set()
        """Keys whose objects came with other bytes than their names say: they count as missing, whatever their size."""
        self.client = s3_client()
        self.conditional = True
        """Whether writes name conditions: until `honours_conditions` has found that the store knows none."""
        self._always: dict[str, str] = {"Bucket": location.bucket}
        if bucket_owner:
            self._always["ExpectedBucketOwner"] = bucket_owner

    def at(self, key: str) -> dict[str, Any]:
        """The arguments that name an object, for the client's own calls."""
        return {**self._always, "Key": self.location.key(key)}

    def errors(self, *, writing: bool = False) -> AbstractContextManager[None]:
        """Within it, the client's errors become this toolkit's."""
        return s3_errors(str(self.location), self.location.bucket, writing=writing)

    def read(self, key: str) -> Stored | None:
        """A small object, or None when there is none."""
        with self.errors():
            for attempt in retrying(worth_retrying):
                with attempt:
                    return self._read(key)
        raise AssertionError("unreachable")

    def _read(self, key: str) -> Stored | None:
        try:
            answer = self.client.get_object(**self.at(key))
        except ClientError as error:
            if error_code(error) in MISSING:
                return None
            raise
        with closing(answer["Body"]) as body:
            data = body.read(SMALL_LIMIT + 1)
        if len(data) != answer["ContentLength"] and len(data) <= SMALL_LIMIT:
            raise CutShortError(f"{len(data)} of {answer['ContentLength']} bytes came")
        if not {"ETag", "LastModified"} <= set(answer):
            raise ResponseParserError("an object without ETag or Last-Modified")
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        return Stored(data, answer["ETag"], age(now, answer["LastModified"]))

    def size(self, key: str) -> int | None:
        """Bytes of an object, or None when there is none."""
        with self.errors():
            try:
                return int(self.client.head_object(**self.at(key))["ContentLength"])
            except ClientError as error:
                if error_code(error) in MISSING:
                    return None
                raise

    def has(self, key: str, size: int) -> bool:
        """Whether there is an object of this size that nothing is known against."""
        return key not in self.wrong and self.size(key) == size

    def put(self, key: str, data: bytes) -> str:
        """Write whatever is there; the new ETag."""
        with self.errors(writing=True):
            return str(self.client.put_object(**self.at(key), Body=data)["ETag"])

    def put_file(self, key: str, path: Path) -> None:
        """Write a file of moderate size, by boto3's own transfer manager."""
        at = self.at(key)
        with self.errors(writing=True), path.open("rb") as file:
            self.client.upload_fileobj(
                file, at.pop("Bucket"), at.pop("Key"), ExtraArgs=at, Config=ONE_REQUEST
            )

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write only over the object with this ETag, or only where there is none (None); the new ETag.

        Raises MovedError. A request that was sent twice because its answer was lost is recognised by the bytes,
        so `data` must be this writer's alone.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        if not self.conditional:
            condition = {}
        with self.errors(writing=True):
            try:
                return str(self.client.put_object(**self.at(key), Body=data, **condition)["ETag"])
            except ClientError as error:
                if error_code(error) not in (*MOVED, *MISSING):
                    raise
        found = self.read(key)
        if found is not None and found.data == data:
            return found.etag
        raise MovedError(found)

    def bucket_region(self) -> str:
        """Where the bucket lies, in AWS's name for it."""
        with self.errors():
            answer = self.client.head_bucket(**self._always)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        return str(
            answer.get("BucketRegion")
            or headers.get("x-amz-bucket-region")
            or self.client.meta.region_name
        )

    def delete(self, key: str) -> None:
        with self.errors(writing=True):
            self.client.delete_object(**self.at(key))

    def honours_conditions(self) -> bool:
        """Whether the store refuses a write whose condition does not hold: asked with an object of no meaning."""
        key = f".probe-{uuid.uuid4().hex}"
        try:
            self.conditional = self._probed(key)
        finally:
            self.delete(key)
        return self.conditional

    def _probed(self, key: str) -> bool:
        try:
            etag = self.put_if(key, b"first", None)
            return all(self._refuses(key, other) for other in (None, f'"{"0" * 32}"')) and not (
                self._refuses(key, etag)
            )
        except AccessError as error:
            if isinstance(error.__cause__, ClientError) and not_implemented(error.__cause__):
                return False
            raise

    def _refuses(self, key: str, etag: str | None) -> bool:
        try:
            self.put_if(key, uuid.uuid4().bytes, etag)
        except MovedError:
            return True
        return False

    def listing(self) -> list[tuple[str, int]]:
        """(key, bytes) of all objects."""
        with self.errors():
            for attempt in retrying(worth_retrying):
                with attempt:
                    return list(self._listed())
        raise AssertionError("unreachable")

    def _listed(self) -> Iterator[tuple[str, int]]:
        base = self.location.key("")
        pages = self.client.get_paginator("list_objects_v2").paginate(**self._always, Prefix=base)
        for page in pages:
            if "Name" not in page:  # as no listing is: a proxy's page would be read as an empty one
                raise ResponseParserError(f"a listing that names no bucket: {sorted(page)}")
            for found in page.get("Contents", []):
                yield found["Key"][len(base) :], found["Size"]

    def stream(self, key: str, offset: int, count: int, etag: str | None = None) -> Iterator[bytes]:
        """The bytes of a range, in pieces; of the object with this ETag alone, if one is given.

        Raises CutShortError and the client's own errors.
        """
        condition = {} if etag is None else {"IfMatch": etag}
        answer = self.client.get_object(
            **self.at(key), **condition, Range=f"bytes={offset}-{offset + count - 1}"
        )
        with closing(answer["Body"]) as body:
            if answer["ContentLength"] != count:
                raise CutShortError(f"{answer['ContentLength']:,} bytes for a range of {count:,}")
            yield from body.iter_chunks(PIECE_BYTES)


def age(now: str, modified: datetime) -> float:
    """Seconds by the store's own clock. 0, so not stale by it, when it does not tell its time in a form that is one."""
    try:
        when = parsedate_to_datetime(now)
    except ValueError:
        return 0.0
    if when.tzinfo is None:  # RFC 5322's -0000, and what two joined Date headers are read as
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - modified).total_seconds())
