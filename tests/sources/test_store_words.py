"""Stores that speak in broken or unknown words: servers on loopback that answer as told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

import pytest

from gemma_neuron.errors import NetworkError, NotMirroredError
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.owner import Owner
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.uploads import Uploads
from tests.loopback import serving
from tests.sources.s3_servers import variables

LISTING = (
    b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>p/k</Key><Size>3</Size></Contents></ListBucketResult>"
)
PAGES = {
    "html": b"<html><body>Sign in to the network<br></body></html>",
    "well-formed": b"<html><body>Sign in to the network</body></html>",
    "damaged": LISTING.replace(b"</Contents>", b"</Contentr>"),
    "empty": b"",
}


def error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>x</Message></Error>".encode()


class Script:
    """`answers`: (status, body) of the next requests; then `last`. `rejects`: 501 to writes with conditions."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.last: tuple[int, bytes] = (200, LISTING)
        self.rejects = False
        self.objects: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        status, body = self.script.answers.pop(0) if self.script.answers else self.script.last
        headers = {"ETag": '"0123"', "Last-Modified": "Sat, 31 Jan 2026 12:00:00 GMT"}
        self._answer(status, body, **headers)

    def do_DELETE(self) -> None:
        self._answer(204, b"")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.script.rejects and (
            self.headers.get("If-Match") or self.headers.get("If-None-Match")
        ):
            self._answer(501, error("NotImplemented"))
        else:
            self._answer(200, b"", ETag='"0123"')


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def store(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Store]:
    with serving(_Handler, script=script) as port:
        own = variables(f"http://127.0.0.1:{port}", AWS_MAX_ATTEMPTS="1", HOME=str(tmp_path))
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        yield Store(S3Location("b", "p"))


@pytest.mark.parametrize("page", PAGES)
def test_a_listing_that_is_none_is_asked_for_again(store: Store, script: Script, page: str) -> None:
    script.answers = [(200, PAGES[page])]
    assert store.listing() == [("k", 3)]
    script.last = (200, PAGES[page])
    with pytest.raises(NetworkError):
        store.listing()


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "XMinioServerNotInitialized"), (429, "TooManyRequests"), (599, "Odd"), (408, "Slow")],
)
def test_trouble_is_known_by_its_status(
    store: Store, script: Script, status: int, code: str
) -> None:
    script.answers = [(status, error(code))]
    found = store.read("k")
    assert found is not None and found.data == LISTING
    script.last = (status, error(code))
    with pytest.raises(NetworkError, match=code):
        store.read("k")


def test_a_store_that_rejects_conditions_serves_one_writer(store: Store, script: Script) -> None:
    script.rejects = True
    assert not store.honours_conditions()
    assert store.put_if("owner.json", b"x", None) == '"0123"'
    assert store.put_if("owner.json", b"y", '"0123"') == '"0123"'


class Lease:
    def release(self) -> None:
        pass


def test_an_upload_thread_survives_whatever_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says it; a terminal that was closed meanwhile is no trouble of the store's."""
    monkeypatch.setattr("gemma_neuron.mirror.uploads.LONGEST_WAIT", 0.1)
    said: list[str] = []
    tries: list[float] = []

    def push() -> bool:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise KeyError("ETag")
        return True

    def tell(line: str) -> None:
        said.append(line)
        raise OSError(5, "Input/output error")

    uploads = Uploads(cast(Owner, Lease()), tell)
    uploads.add(push, "mirror", 0.1)
    uploads.start()
    uploads.finish(30.0, lambda: "" if len(tries) > 2 else "a set", "s3://b/p")
    assert len(tries) >= 3 and "KeyError: 'ETag'" in said[0]

    hopeless = Uploads(cast(Owner, Lease()), said.append)
    hopeless.add(lambda: bool(1 / 0), "mirror", 0.1)
    hopeless.start()
    with pytest.raises(NotMirroredError, match="ZeroDivisionError"):
        hopeless.finish(0.5, lambda: "a set", "s3://b/p")
