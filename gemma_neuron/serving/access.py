"""Who may talk to the server: host, origin, key, content type, size and time of a body.

Plain ASGI, before any framework code. Loopback is no boundary: any web page in the user's browser can
send requests there, which the Host and Origin checks refuse (DNS rebinding, cross-site posts).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gemma_neuron.serving.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/health/live", "/"})
OPEN_PREFIX = "/page/"
"""Open without the key: what a balancer asks, and the files of the page, which are the package's own, say nothing of
the port, and ask for the key themselves (a browser sends none when it opens an address)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """`hosts` None accepts any Host header: for a server bound to all addresses behind its key."""

    hosts: frozenset[str] | None = LOOPBACK_NAMES
    api_key: str | None = None
    body_bytes: int = 4 * 1024 * 1024
    body_seconds: float = 30.0


DISCARDED_BYTES = 64 * 2**20
DISCARD_SECONDS = 2.0


class AccessGuard:
    """ASGI middleware that answers what the rules refuse, in OpenAI's error shape."""

    def __init__(self, app: App, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unread = scope["method"] in ("POST", "PUT", "PATCH")
        try:
            headers = _headers(scope)
            self._check_host(headers)
            self._check_key(scope, headers)
            if unread:
                _check_content_type(headers)
                unread = False
                body = await self._read_body(headers, receive)
                receive = _replay(body, receive)
        except ApiError as error:
            if unread:
                await _discard_body(receive)
            await _refuse(send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: dict[str, str]) -> None:
        allowed = self._rules.hosts
        host = headers.get("host", "")
        if allowed is not None and host_name(host) not in allowed:
            raise ApiError(
                403, f"The Host header {host[:200]!r} is not one of this server's names."
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, f"Requests from the origin {origin[:200]!r} are not accepted.")

    def _check_key(self, scope: Scope, headers: dict[str, str]) -> None:
        key = self._rules.api_key
        if key is None or open_to_all(scope["path"]):
            return
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _read_body(self, headers: dict[str, str], receive: Receive) -> bytes:
        limit = self._rules.body_bytes
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await _discard_body(receive)
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._rules.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The client left before its request was complete.")
                    body += message.get("body", b"")
                    more = bool(message.get("more_body", False))
                    if len(body) > limit:
                        if more:
                            await _discard_body(receive)
                        raise _too_large(limit)
                    if not more:
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408, f"The request body took longer than {self._rules.body_seconds:g} s."
            ) from None


async def _discard_body(receive: Receive) -> None:
    """Read what is left of a refused body, within bounds, and keep none of it.

    A connection closed on unread bytes is reset, and the client may never see why it was refused.
    """
    left = DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def open_to_all(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def host_name(header: str) -> str:
    """The name in a Host header, lower case, without port and brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0] if header.count(":") <= 1 else header


def _check_content_type(headers: dict[str, str]) -> None:
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != "application/json":
        raise ApiError(415, f"The content type must be application/json, not {found[:100]!r}.")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.")


def _headers(scope: Scope) -> dict[str, str]:
    """Header values by lower-case name; a Host or Origin sent twice is refused."""
    out: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in out and key in ("host", "origin", "authorization", "content-type"):
            raise ApiError(400, f"The header {key!r} was sent twice.")
        out[key] = value.decode("latin-1")
    return out


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once and then waits for the client to leave."""
    given = False

    async def wrapped() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return wrapped


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
