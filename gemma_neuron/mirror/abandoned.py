"""Uploads in parts that nobody goes on with: their parts are paid for, and shown by no listing of objects.

In: a store. Out: those begun long ago are aborted. A bucket's own rule (AbortIncompleteMultipartUpload) does the same
for ports that nobody compiles any more: https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from gemma_neuron.aws import error_code
from gemma_neuron.mirror.parts import GONE
from gemma_neuron.mirror.store import Store, age

ABANDONED_SECONDS = 7 * 86400.0
"""Age at which an upload is taken for one that nobody goes on with."""


def abort_abandoned(store: Store, check: Callable[[], None]) -> int:
    """Abort the uploads under the store's prefix that were begun too long ago, by its own clock; how many.

    `check`: called before each, raises when nothing more is to be written. Raises AccessError or NetworkError.
    """
    at = store.at("")
    prefix, count = at.pop("Key"), 0
    with store.errors(writing=True):
        pages = store.client.get_paginator("list_multipart_uploads").paginate(**at, Prefix=prefix)
        try:
            found = [
                upload
                for page in pages
                for upload in page.get("Uploads", [])
                if _seconds(page, upload) > ABANDONED_SECONDS
            ]
        except ClientError as error:
            if error_code(error) not in GONE:  # what some stores say of a bucket without any
                raise
            return 0
        for upload in found:
            check()
            try:
                store.client.abort_multipart_upload(
                    **at, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                count += 1
            except ClientError as error:
                if error_code(error) not in GONE:
                    raise
    return count


def _seconds(page: dict[str, Any], upload: dict[str, Any]) -> float:
    said = page["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    return age(said, upload["Initiated"])
