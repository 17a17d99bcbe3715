"""What boxes install is looked for before one is bought. A real index on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gemma_neuron.errors import UsageError
from gemma_neuron.spot import published
from gemma_neuron.spot.published import require_published

ASKED: list[str] = []


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED.append(self.path)
        found = {"/pypi/gemma-neuron/1.0.0/json": 200, "/pypi/gemma-neuron/3.0.0/json": 503}
        self.send_response(found.get(self.path, 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ASKED.clear()
    monkeypatch.setattr(published, "INDEX", f"http://127.0.0.1:{server.server_port}/pypi")
    yield
    server.shutdown()
    server.server_close()


def test_a_release_is_looked_for(index: None) -> None:
    said: list[str] = []
    require_published("gemma-neuron==1.0.0", said.append)
    assert (ASKED, said) == (["/pypi/gemma-neuron/1.0.0/json"], [])
    with pytest.raises(UsageError, match="no such release") as caught:
        require_published("gemma-neuron==2.0.0", said.append)
    assert "--toolkit" in caught.value.hint


def test_an_index_that_cannot_tell_is_said(index: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    require_published("gemma-neuron==3.0.0", said.append)
    monkeypatch.setattr(published, "INDEX", "http://127.0.0.1:9/pypi")
    require_published("gemma-neuron==1.0.0", said.append)
    assert ["503" in said[0], "could not be asked" in said[1], len(said)] == [True, True, 2]


def test_what_carries_its_digest_is_not_looked_for(index: None) -> None:
    require_published(f"git+https://example.org/g@{'a' * 40}", pytest.fail)
    require_published(
        f"https://example.org/gemma_neuron-1-py3-none-any.whl#sha256={'a' * 64}", pytest.fail
    )
    assert ASKED == []
