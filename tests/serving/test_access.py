"""Who is let in: Host, Origin, content type, key."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx2
import openai
import pytest

from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.local import access_rules
from tests.serving.server import (
    USER,
    RunningServer,
    chat,
    running,
)

GOOD = {"messages": USER, "max_tokens": 2}
ACCESS: dict[str, tuple[dict[str, str], int]] = {
    "plain": ({}, 200),
    "name": ({"host": "localhost:9"}, 200),
    "rebinding": ({"host": "evil.example:8000"}, 403),
    "loopback prefix": ({"host": "127.0.0.1.evil.example"}, 403),
    "foreign origin": ({"origin": "https://evil.example"}, 403),
    "null origin": ({"origin": "null"}, 403),
    "own origin": ({"host": "localhost:9", "origin": "http://localhost:9"}, 200),
    "form post": ({"content-type": "text/plain"}, 415),
    "no type": ({"content-type": ""}, 415),
    "charset": ({"content-type": "application/json; charset=utf-8"}, 200),
}


@pytest.mark.parametrize("name", ACCESS)
def test_host_origin_and_content_type(free: RunningServer, name: str) -> None:
    headers, status = ACCESS[name]
    reply = httpx2.post(f"{free.url}/v1/chat/completions", json=GOOD, headers=headers)
    assert reply.status_code == status
    assert "access-control-allow-origin" not in reply.headers
    if status != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    if "host" in headers:
        listed = httpx2.get(f"{free.url}/v1/models", headers=headers)
        assert listed.status_code == status


def test_no_cors_preflight(free: RunningServer) -> None:
    reply = httpx2.request(
        "OPTIONS",
        f"{free.url}/v1/chat/completions",
        headers={"origin": "https://evil.example", "access-control-request-method": "POST"},
    )
    assert reply.status_code == 403


def test_key(folder: Path) -> None:
    with running(folder, rules=AccessRules(api_key="secret")) as server:
        with pytest.raises(openai.AuthenticationError):
            chat(server)
        assert server.client(api_key="secret").models.list().data
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        assert httpx2.get(f"{server.url}/health/ready").status_code == 401
        for wrong in ("secret", "Bearer secre", "Bearer secret2", "bearer é"):
            reply = httpx2.get(
                f"{server.url}/v1/models", headers=[(b"authorization", wrong.encode())]
            )
            assert reply.status_code == 401


@pytest.mark.parametrize(
    ("key", "given"), [("secret", "bearer secret"), ("schlüßel", "Bearer schlüßel")]
)
def test_a_key_is_right_whatever_its_letters_and_the_case_of_the_scheme(
    folder: Path, key: str, given: str
) -> None:
    with running(folder, rules=AccessRules(api_key=key)) as server:
        headers = [(b"authorization", given.encode())]
        assert httpx2.get(f"{server.url}/v1/models", headers=headers).status_code == 200


NAMES = {
    "10.1.2.3:8000": 200,
    "[fd00::1]:8000": 200,
    "localhost": 200,
    "gemma.example": 200,
    "GEMMA.example:443": 200,
    f"{socket.gethostname()}:8000": 200,
    "evil.example": 403,
    "10.1.2.3.evil.example": 403,
    "": 403,
}


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_open_to_all_without_a_key_only_known_names_and_addresses_are_answered(
    folder: Path, address: str
) -> None:
    rules = access_rules(address, None, no_auth=True, allow_hosts=["gemma.Example"])
    with running(folder, rules=rules) as server:
        found = {
            name: httpx2.get(f"{server.url}/v1/models", headers={"host": name}).status_code
            for name in NAMES
        }
    assert found == NAMES
