"""What the hub answers instead of a file, in this toolkit's words.

In: an exception of huggingface_hub or of its HTTP client. Out: whether to try again, and the error a user sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from gemma_neuron.errors import (
    AccessError,
    GemmaNeuronError,
    IntegrityError,
    NetworkError,
    SourceNotFoundError,
)
from gemma_neuron.transfer import TRIES, CutShortError

BUSY = (408, 425, 429, 500, 502, 503, 504)
LONGEST_QUOTE = 300


class StaleLinkError(Exception):
    """A signed link of the hub's storage no longer works; a new one must be asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, to name it in a message."""

    repo: str
    revision: str

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/{self.repo}"


def worth_retrying(error: Exception) -> bool | float:
    """Whether the same request may succeed later; the seconds to wait where the hub names them."""
    cause = _cause(error)
    if isinstance(cause, HfHubHTTPError):
        waited = cause.response.headers.get("Retry-After", "")
        return cause.response.status_code in BUSY and (float(waited) if waited.isdigit() else True)
    return isinstance(cause, httpx2.TransportError | StaleLinkError | XetDownloadError)


@contextmanager
def hub_errors(asked: Asked) -> Iterator[None]:
    """Errors of the hub become AccessError, NetworkError or SourceNotFoundError."""
    try:
        yield
    except GemmaNeuronError:
        raise
    except Exception as error:
        told = _told(_cause(error), asked)
        if told is None:
            raise
        raise told from error


def _cause(error: Exception) -> Exception:
    """huggingface_hub wraps what went wrong in `LocalEntryNotFoundError`; the first cause says more."""
    found: BaseException = error
    seen = [found]
    while found.__cause__ is not None and found.__cause__ not in seen:
        if isinstance(found, HfHubHTTPError | httpx2.TransportError | OfflineModeIsEnabled):
            break
        found = found.__cause__
        seen.append(found)
    return found if isinstance(found, Exception) else error


def _told(error: Exception, asked: Asked) -> GemmaNeuronError | None:
    if isinstance(error, HfHubHTTPError):
        return _refused(error, asked)
    if isinstance(error, CutShortError | StaleLinkError | XetDownloadError | httpx2.TransportError):
        return NetworkError(
            f"The hub at {constants.ENDPOINT} failed {TRIES} times for {asked.repo}, at last with "
            f"{type(error).__name__}: {str(error)[:LONGEST_QUOTE] or 'no reason given'}.",
            "Check the network, HF_ENDPOINT and any proxy, then run the same command: it goes on.",
        )
    if isinstance(error, OSError) and "Consistency check" in str(error):
        return IntegrityError(
            f"A file of {asked.repo} has another size than the hub says.", "Run the command again."
        )
    return None


def _refused(error: HfHubHTTPError, asked: Asked) -> GemmaNeuronError:
    status = error.response.status_code
    said = _quote(error)
    if isinstance(error, GatedRepoError):
        return _gated(status, said, asked)
    if isinstance(error, RevisionNotFoundError):
        return SourceNotFoundError(
            f"{asked.repo} is on the hub and has no revision {asked.revision}.",
            f"Name a branch, tag or commit listed at {asked.page}/commits: {asked.repo}@main.",
        )
    if isinstance(error, RepositoryNotFoundError) and status == 404:
        return SourceNotFoundError(
            f"There is neither a folder {asked.repo} nor such a model on the hub ({constants.ENDPOINT}).",
            "Check the spelling; a private model needs a token of its organisation in HF_TOKEN.",
        )
    if isinstance(error, DisabledRepoError):
        return AccessError(f"{asked.repo} was disabled by the hub.", f"Read why at {asked.page}.")
    if status == 401:
        return _unknown_user(said, asked)
    if status == 403:
        return AccessError(
            f"The hub forbids {asked.repo} to this token (403{said}).",
            f"Open {asked.page} with the token's account; set HF_TOKEN to a token with read access to it.",
        )
    if status in BUSY:
        return NetworkError(
            f"The hub at {constants.ENDPOINT} answered {status} to {TRIES} requests for "
            f"{asked.repo}{said}.",
            "Run the same command later: what was fetched stays. "
            + ("A token in HF_TOKEN has a higher limit." if status == 429 else ""),
        )
    return NetworkError(
        f"The hub at {constants.ENDPOINT} answered {status} for {asked.repo}@{asked.revision}{said}.",
        "Check HF_ENDPOINT; it must be a hub.",
    )


def has_token() -> bool:
    """Whether this user has a token of the hub, in HF_TOKEN or the hub's own file."""
    return get_token() is not None


def _gated(status: int, said: str, asked: Asked) -> AccessError:
    accept = f"Accept the terms at {asked.page} with your account"
    if not has_token():
        return AccessError(
            f"{asked.repo} is gated and no token was sent ({status}{said}).",
            f"{accept}, make a read token at {constants.ENDPOINT}/settings/tokens and set HF_TOKEN to it.",
        )
    return AccessError(
        f"{asked.repo} is gated and the account of this token is not let in ({status}{said}).",
        f"{accept} and wait until access is granted, then set HF_TOKEN to a token of that account; a "
        "fine-grained one needs read access to public gated repositories.",
    )


def _unknown_user(said: str, asked: Asked) -> AccessError:
    tokens = f"{constants.ENDPOINT}/settings/tokens"
    if not has_token():
        return AccessError(
            f"{asked.repo}: no token was sent, and the hub answers 401{said}: it is private, gated or not "
            "there at all.",
            f"Check the spelling; if it is gated accept the terms at {asked.page}, then set HF_TOKEN to a "
            f"read token from {tokens}.",
        )
    return AccessError(
        f"{asked.repo}: the hub does not accept the token that was sent (401{said}).",
        f"Set HF_TOKEN to a valid read token from {tokens}, and accept the terms at {asked.page} if gated.",
    )


def _quote(error: HfHubHTTPError) -> str:
    """The hub's own words, bounded; empty when it said nothing."""
    message = error.response.headers.get("X-Error-Message") or ""
    return f": {message[:LONGEST_QUOTE]}" if message else ""
