"""One S3 client, and what a store's refusals mean.

In: nothing but botocore's environment variables and files. Out: a client; AccessError, NetworkError and
SourceNotFoundError with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as failures
from botocore.config import Config

from gemma_neuron import aws
from gemma_neuron.aws import (
    BAD_CREDENTIALS,
    LOST,
    NO_CREDENTIALS,
    RENEW,
    error_code,
    error_status,
    error_text,
)
from gemma_neuron.errors import AccessError, GemmaNeuronError, NetworkError, SourceNotFoundError
from gemma_neuron.transfer import WORKERS, CutShortError

AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
READ_RIGHTS = "s3:GetObject (kms:Decrypt if encrypted)"
WRITE_RIGHTS = (
    "s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, s3:ListMultipartUploadParts and "
    "s3:ListBucketMultipartUploads (kms:GenerateDataKey and kms:Decrypt if encrypted)"
)
BUSY = ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling")
BUSY_STATUS = (408, 429)
"""And all from 500 on but NOT_IMPLEMENTED, whatever a store calls its trouble."""
NOT_IMPLEMENTED = 501


def s3_client() -> Any:
    """A client for the store that the environment names (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS).

    Another store than AWS is spoken to with the bucket in the path, as all of them understand, unless the
    profile sets an addressing style of its own. Raises AccessError without usable configuration.
    """
    with aws.configuration_errors("AWS_ENDPOINT_URL_S3"):
        core = aws.core_session()
        session = aws.session(core)
        config = aws.config(max_pool_connections=2 * WORKERS)
        client = session.client("s3", config=config)
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        style = (core.get_config_variable("s3") or {}).get("addressing_style")
        if not host.endswith(AWS_HOSTS) and not style:
            config = config.merge(Config(s3={"addressing_style": "path"}))
            client = session.client("s3", config=config)
        return client


def worth_retrying(error: Exception) -> bool:
    """Whether a transfer may go on after this error; boto3 itself retries single requests."""
    return isinstance(error, LOST) or (isinstance(error, failures.ClientError) and _busy(error))


def not_implemented(error: failures.ClientError) -> bool:
    """Whether the store does not know what was asked of it."""
    return error_status(error) == NOT_IMPLEMENTED or error_code(error) == "NotImplemented"


def _busy(error: failures.ClientError) -> bool:
    status = error_status(error)
    if not_implemented(error):
        return False
    return error_code(error) in BUSY or status >= 500 or status in BUSY_STATUS


@contextmanager
def s3_errors(uri: str, bucket: str, *, writing: bool = False) -> Iterator[None]:
    """Errors of the store become this toolkit's, each with what to do."""
    try:
        yield
    except GemmaNeuronError:
        raise
    except NO_CREDENTIALS as error:
        raise aws.no_credentials(error) from error
    except failures.ClientError as error:
        raise _refused(error, uri, bucket, writing) from error
    except (*LOST, CutShortError) as error:
        raise NetworkError(
            f"{uri} could not be {'written' if writing else 'read'}, tried again and again, at last "
            f"{type(error).__name__}: {error}",
            "Check the network and AWS_ENDPOINT_URL_S3, then run the same command: it goes on.",
        ) from error
    except failures.BotoCoreError as error:
        raise AccessError(
            f"{uri} cannot be asked for: {type(error).__name__}: {error}",
            "Check AWS_REGION, AWS_ENDPOINT_URL_S3 and the profile.",
        ) from error


def _refused(error: failures.ClientError, uri: str, bucket: str, writing: bool) -> GemmaNeuronError:
    code = error_code(error)
    said = error_text(error)
    # An answer to HEAD has no body that could name the code.
    if code == "NoSuchBucket" or (code == "404" and error.operation_name == "HeadBucket"):
        return AccessError(
            f"{uri}: there is no bucket {bucket} in this store.",
            "Check the name, AWS_REGION and AWS_ENDPOINT_URL_S3.",
        )
    if code in ("404", "NoSuchKey"):
        return SourceNotFoundError(
            f"{uri}: an object is gone: {said}", "Check what is under the prefix."
        )
    if code in ("412", "PreconditionFailed"):
        return NetworkError(
            f"{uri}: an object was replaced while it was read.", "Run the same command again."
        )
    if code in BAD_CREDENTIALS:
        return AccessError(
            f"{uri}: the store does not accept these credentials ({code}: {said}).",
            RENEW,
        )
    if code in ("AccessDenied", "403", "AllAccessDisabled", "UnauthorizedAccess"):
        return AccessError(
            f"{uri}: these credentials may not {'write' if writing else 'read'} there ({code}: {said}).",
            f"Grant s3:ListBucket on {bucket} and {WRITE_RIGHTS if writing else READ_RIGHTS} under the prefix.",
        )
    if code in (
        "PermanentRedirect",
        "301",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    ):
        return AccessError(
            f"{uri}: the bucket is in another region ({said}).",
            "Set AWS_REGION to the bucket's region.",
        )
    if _busy(error):
        return NetworkError(
            f"{uri}: the store kept answering {code}: {said}", "Run the same command later."
        )
    return AccessError(
        f"{uri}: the store refused with {code}: {said}", "Check the store and the URI."
    )
