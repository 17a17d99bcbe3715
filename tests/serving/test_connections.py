"""Who makes room where there are too many connections, and for which limit."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from gemma_neuron.serving import connections
from tests.serving.server import running, write_port
from tests.serving.test_local import announced

MOST = 20


def connected(url: str, said: bytes = b"") -> socket.socket:
    found = urlsplit(url)
    assert found.hostname is not None
    client = socket.create_connection((found.hostname, found.port or 0), timeout=10)
    client.sendall(said)
    return client


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_those_that_never_asked_make_room_first_the_oldest_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", MOST)
    with running(folder) as server:
        known = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
        known.request("GET", "/health/live")
        assert known.getresponse().read()
        begun = connected(server.url, b"GET /health/live HTTP/1.1\r\nHost: lo")
        silent = []
        for _ in range(3 * MOST):
            silent.append(connected(server.url))
            time.sleep(0.002)
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        begun.sendall(b"calhost\r\n\r\n")
        assert begun.recv(12) == b"HTTP/1.1 200"
        kept = known.sock
        known.request("GET", "/health/live")
        assert known.getresponse().read()
        assert known.sock is kept, "the connection of a client between two requests was closed"
        left = [is_open(client) for client in silent]
        assert left == sorted(left), "a younger one was closed before an older one"
        assert MOST - 4 <= sum(left) <= MOST - 2
        known.close()
        for client in (begun, *silent):
            client.close()


def test_there_are_never_more_than_descriptors_allow(tmp_path: Path) -> None:
    """Past it accept() fails and the event loop takes no connection of anybody for a second each time."""
    write_port(tmp_path)
    limit = 400
    program = [sys.executable, "-m", "tests.serving.serve_process", str(tmp_path)]
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with process:
        try:
            url = announced(process)["url"]
            silent = [connected(url) for _ in range(2 * limit)]
            assert httpx2.get(f"{url}/health/live", timeout=5).status_code == 200
            descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
            assert len(descriptors) < limit // 2
            for client in silent:
                client.close()
        finally:
            process.kill()
