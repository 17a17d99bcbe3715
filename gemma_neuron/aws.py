"""One way to a client of AWS, by boto3's own conventions, and the errors that every service shares.

In: nothing but botocore's environment variables and files. Out: a session, AccessError with a remedy. Instance
credentials come by IMDSv2 only: version 1 answers to any request that a program can be talked into making.
Imported by what asks a service, never at start: boto3 takes a second to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import boto3
import botocore.exceptions as failures
import botocore.session
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from gemma_neuron import __version__
from gemma_neuron.errors import AccessError
from gemma_neuron.machine import instance_type

CONNECT_SECONDS = 10
READ_SECONDS = 60
LOST = (
    failures.HTTPClientError,  # reads, proxies, TLS, closed connections
    failures.ConnectionError,  # no answer at all
    failures.ResponseStreamingError,
    failures.IncompleteReadError,
    failures.FlexibleChecksumError,
    ResponseParserError,  # a page of a proxy, or an answer damaged on its way; botocore's only error without a base
)
NO_CREDENTIALS = (
    failures.NoCredentialsError,
    failures.CredentialRetrievalError,
    failures.PartialCredentialsError,
    failures.TokenRetrievalError,
    failures.MetadataRetrievalError,
    failures.SSOError,
    failures.ProfileNotFound,
    failures.ConfigParseError,
)
BAD_CREDENTIALS = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
    "InvalidClientTokenId", "RequestTimeTooSkewed", "AuthFailure", "RequestExpired", "UnrecognizedClientException",
    "ExpiredTokenException", "InvalidSignatureException",
)  # fmt: skip
RENEW = "Renew them: aws sso login, a new key, or the right AWS_PROFILE; check the machine's clock."


def core_session() -> Any:
    """botocore's side of a session: its settings. Asks instance metadata by version 2 only."""
    core = botocore.session.get_session()
    core.set_config_variable("ec2_metadata_v1_disabled", True)
    core.register_component("data_loader", _loader(core.get_config_variable("data_path") or ""))
    return core


@cache
def _loader(paths: str) -> Any:
    """Reads the services' descriptions, each once a process: they are megabytes of JSON."""
    return create_loader(paths or None)


def credentials_kind() -> str:
    """Where boto3 finds credentials (env, shared-credentials-file, iam-role, …), or empty. Asks no service but, on EC2,
    the instance's metadata."""
    core = core_session()
    if not instance_type():
        core.get_component("credential_provider").remove("iam-role")
    try:
        found = core.get_credentials()
    except NO_CREDENTIALS:
        return ""
    return "" if found is None else str(found.method)


def session(core: Any = None) -> Any:
    """A boto3 session, which makes clients."""
    return boto3.Session(botocore_session=core_session() if core is None else core)


def config(**more: Any) -> Config:
    """A client's configuration: who asks, and how long it waits. `more`: botocore's own, over these."""
    own = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "user_agent_extra": f"gemma-neuron/{__version__}",
    }
    return Config(**own | more)


@contextmanager
def configuration_errors(endpoint: str) -> Iterator[None]:
    """What boto3 cannot start with becomes an AccessError. `endpoint`: the variable that names the service's."""
    try:
        yield
    except failures.NoRegionError as error:
        raise AccessError(
            "boto3 found no AWS region.", "Set AWS_REGION, or region in the profile."
        ) from error
    except NO_CREDENTIALS as error:
        raise no_credentials(error) from error
    except ValueError as error:
        raise AccessError(
            f"boto3's configuration cannot be used: {error}.", f"Check {endpoint} and AWS_REGION."
        ) from error


def no_credentials(error: Exception) -> AccessError:
    return AccessError(
        f"There are no usable AWS credentials: {error}",
        "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the instance a role.",
    )


def error_code(error: failures.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: failures.ClientError) -> int:
    """The answer's HTTP status; 0 where there was none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def error_text(error: failures.ClientError) -> str:
    """What the service said, at most 300 characters: some say very much."""
    return str(error.response.get("Error", {}).get("Message", ""))[:300]
