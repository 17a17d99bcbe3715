"""`s3://bucket/prefix`, checked before anything is asked of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemma_neuron.errors import UsageError

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
LONGEST_KEY = 1024
"""Bytes of UTF-8, S3's limit."""


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and a prefix without slashes at its ends; an empty prefix is the bucket itself."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, uri: str) -> S3Location:
        """Raises UsageError when `uri` is not of the form s3://bucket/prefix."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        prefix = prefix.strip("/")
        parts = prefix.split("/") if prefix else []
        plain = prefix.isprintable() and all(part not in ("", ".", "..") for part in parts)
        if not (uri.startswith("s3://") and BUCKET.fullmatch(bucket) and plain):
            raise UsageError(
                f"{uri} is no S3 location.", "Write s3://bucket/prefix, the bucket in lower case."
            )
        if len(prefix.encode()) > LONGEST_KEY:
            raise UsageError(f"The prefix of {uri[:80]}… is longer than S3's {LONGEST_KEY} bytes.")
        return cls(bucket, prefix)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")
