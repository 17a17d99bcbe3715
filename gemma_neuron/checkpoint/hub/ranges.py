"""Ranges of a hub repository's files, by plain HTTP from wherever the hub keeps them.

In: repository, commit, name, range. Out: bytes. The hub is asked once for each file where it lies and what its
ETag is (the content's digest); the ranges then come from its storage, which signs links that expire.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from gemma_neuron import __version__
from gemma_neuron.checkpoint.hub.problems import Asked, StaleLinkError, hub_errors, worth_retrying
from gemma_neuron.errors import IntegrityError, NetworkError
from gemma_neuron.transfer import CutShortError, retrying

USER_AGENT = f"gemma-neuron/{__version__}"
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file lies. `digest` is its ETag: SHA-256 (64 hex) of an LFS file, git's SHA-1 (40) of others."""

    url: str
    digest: str
    size: int
    on_hub: bool


class Ranges:
    """The files of one repository at one commit."""

    def __init__(self, repo: str, commit: str) -> None:
        self.asked = Asked(repo, commit)
        self._places: dict[str, Place] = {}
        self._lock = threading.Lock()

    def place(self, name: str) -> Place:
        """Where `name` lies, asked once; again after a link went stale."""
        with self._lock:
            if name not in self._places:
                self._places[name] = self._ask(name)
            return self._places[name]

    def _ask(self, name: str) -> Place:
        url = hf_hub_url(self.asked.repo, name, revision=self.asked.revision)
        found = get_hf_file_metadata(
            url, timeout=constants.HF_HUB_ETAG_TIMEOUT, user_agent=USER_AGENT
        )
        if found.commit_hash != self.asked.revision or found.etag is None or found.size is None:
            raise NetworkError(
                f"{url} answers without the commit, ETag or size of the file: commit {found.commit_hash}, "
                f"ETag {found.etag}, size {found.size}.",
                "Check HF_ENDPOINT and any proxy; it must be a hub.",
            )
        same = urlsplit(found.location)[:2] == urlsplit(url)[:2]
        return Place(found.location, found.etag, found.size, same)

    def stream(self, name: str, offset: int, count: int) -> Iterator[bytes]:
        """The bytes of a range, in pieces. Raises what the client raises; retrying is the caller's."""
        place = self.place(name)
        headers = {
            **build_hf_headers(token=None if place.on_hub else False, user_agent=USER_AGENT),
            "Range": f"bytes={offset}-{offset + count - 1}",
            "Accept-Encoding": "identity",
        }
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", place.url, headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                with self._lock:
                    self._places.pop(name, None)
                if not place.on_hub and response.status_code not in (408, 425, 429):
                    raise StaleLinkError(f"the storage answered {response.status_code} for {name}")
            hf_raise_for_status(response)
            said = response.headers.get("Content-Range", "")
            _require_range(name, response.status_code, said, offset, count, place.size)
            yield from response.iter_bytes()

    def read(self, name: str, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`, with retries. Raises AccessError or NetworkError."""
        data = b""
        with hub_errors(self.asked):
            for attempt in retrying(worth_retrying):
                with attempt:
                    data = b"".join(self.stream(name, offset, count)) if count else b""
                    if len(data) != count:
                        raise CutShortError(f"{len(data):,} of {count:,} bytes of {name} came")
        return data


def _require_range(name: str, status: int, said: str, offset: int, count: int, size: int) -> None:
    """Refuse an answer that is another range than the one asked for, before its body is read."""
    found = CONTENT_RANGE.fullmatch(said)
    whole = status == 200 and offset == 0 and count == size
    if status == 206 and found is not None:
        whole = (int(found[1]), int(found[2])) == (offset, offset + count - 1)
        if found[3] not in ("*", str(size)):
            raise IntegrityError(
                f"{name} has {found[3]} bytes where the hub said {size}.",
                "A proxy alters files, or HF_ENDPOINT is no hub.",
            )
    if not whole:
        raise NetworkError(
            f"{name}: bytes {offset} to {offset + count - 1} were asked for, and the server answered "
            f"{status} {said or 'without a range'}.",
            "A proxy that drops Range headers is in the way, or HF_ENDPOINT is no hub.",
        )
