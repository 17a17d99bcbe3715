"""What is measured, and what hostile connections cost."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gemma_neuron.serving import connections
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import RunningServer, chat, running, streamed, until


def metric(text: str, name: str) -> dict[str, float]:
    """Values of one metric by their labels."""
    found = re.findall(rf"^gemma_neuron_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def read(server: RunningServer) -> str:
    return httpx2.get(f"{server.url}/metrics").text


def test_metrics_count_what_was_served(folder: Path) -> None:
    with running(folder) as server:
        usage = chat(server, max_tokens=7).usage
        streamed(server, max_tokens=5, n=2)
        with pytest.raises(openai.BadRequestError):
            chat(server, temperature=9)
        text = read(server)
        by = '{replica="0"}'
        assert metric(text, "generated_tokens_total") == {by: 17}
        assert metric(text, "prompt_tokens_total") == {"": 2 * usage.prompt_tokens}
        assert metric(text, "time_to_first_token_seconds_count") == {by: 3}
        assert metric(text, "inter_token_seconds_count") == {by: 14}
        assert metric(text, "requests_total") == {'{end="length"}': 3}
        assert metric(text, "refused_requests_total") == {'{status="400"}': 1}
        assert metric(text, "replica_ready") == {by: 1}
        assert metric(text, "replica_restarts_total") == {by: 0}
        assert metric(text, "queue_requests") == {"": 0}


def test_metrics_show_the_batch_and_the_queue(folder: Path) -> None:
    runner = FakeRunner(slots=2, max_context=2000, step_seconds=0.005)
    with running(folder, runner) as server:
        streams = [chat(server, stream=True) for _ in range(3)]
        for stream in streams[:2]:
            next(stream)
            next(stream)
        until(lambda: metric(read(server), "queue_requests")[""] == 1)
        text = read(server)
        assert metric(text, "queue_requests")[""] == 1
        assert metric(text, "batch_requests")['{replica="0"}'] == 2
        assert 0 < metric(text, "kv_used_ratio")['{replica="0"}'] < 0.5
        for stream in streams:
            stream.close()


def test_readiness_tells_progress(free: RunningServer) -> None:
    body: dict[str, Any] = httpx2.get(f"{free.url}/health/ready").json()
    assert body["progress"]["ready"] == body["progress"]["replicas"] == 1
    assert body["progress"]["states"][0]["phase"] == "ready"


def test_connections_without_a_request_are_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with running(folder) as server:
        host, port = server.url.removeprefix("http://").split(":")
        silent = socket.create_connection((host, int(port)))
        half = socket.create_connection((host, int(port)))
        half.sendall(b"GET /v1/models HTTP/1.1\r\nHost: loc")
        for one in (silent, half):
            one.settimeout(10)
            assert one.recv(1) == b""
            one.close()
        assert httpx2.get(f"{server.url}/v1/models").status_code == 200


def test_idle_connections_make_room_for_clients(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, opened = 20, 60
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", most)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 600.0)
    with running(folder) as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(opened)]
        assert chat(server, max_tokens=2)
        until(lambda: sum(map(closed, idle)) > opened - most)
        for one in idle:
            one.close()


def closed(one: socket.socket) -> bool:
    """Whether the server ended a connection it has sent nothing to."""
    one.setblocking(False)
    try:
        return one.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_reader_that_does_not_read_loses_its_connection_and_its_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.2)
    runner = FakeRunner(slots=1, max_context=100_000, step_seconds=0.001, script=[300])
    with running(folder, runner) as server, socket.socket() as stuck:
        host, port = server.url.removeprefix("http://").split(":")
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true,'
        body += b'"logprobs": true, "top_logprobs": 20}'  # megabytes soon
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((host, int(port)))
        stuck.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        until(lambda: server.engine.states()[0].load.running == 1)
        # The whole answer takes 100 s; a slot that is given up, as long as the buffers take to fill.
        assert chat(server, max_tokens=2, timeout=30).choices[0].finish_reason == "length"
        stuck.settimeout(30)
        assert b"[DONE]" not in until_closed(stuck)


def until_closed(one: socket.socket) -> bytes:
    """All that is on its way to a connection, whose end must come."""
    found = b""
    with suppress(ConnectionResetError):
        while part := one.recv(2**20):
            found += part
    return found
