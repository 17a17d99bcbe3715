"""Who may talk to the server: host, origin, key, content type, size and time of a body.

Plain ASGI, before any framework code. Loopback is no boundary: any web page in the user's browser can
send requests there, which the Host and Origin checks refuse (DNS rebinding, cross-site posts).
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from gemma_neuron.serving.bodies import (
    Bodies,
    BodyLimits,
    Held,
    Message,
    Receive,
    discard_body,
    replay,
)
from gemma_neuron.serving.errors import ApiError

Scope = MutableMapping[str, Any]
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
    bodies: BodyLimits = field(default_factory=BodyLimits)


class AccessGuard:
    """ASGI middleware that answers what the rules refuse, in OpenAI's error shape."""

    def __init__(self, app: App, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules
        self._bodies = Bodies(rules.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.holding() as held:
            try:
                allowed = await self._allowed(held, scope, receive)
            except ApiError as error:
                await _refuse(send, error)
                return
            await self._app(scope, allowed, self._releasing(held, send))

    async def _allowed(self, held: Held, scope: Scope, receive: Receive) -> Receive:
        """What the application receives. Raises ApiError for what the rules refuse, with no body left unread."""
        unread = scope["method"] in ("POST", "PUT", "PATCH")
        try:
            headers = _headers(scope)
            self._check_host(headers)
            self._check_key(scope, headers)
            if not unread:
                return receive
            _check_content_type(headers)
        except ApiError:
            if unread:
                await discard_body(receive)
            raise
        return replay(await self._bodies.read(held, headers, receive), receive)

    def _releasing(self, held: Held, send: Send) -> Send:
        """From the answer's first byte on a body counts no more: what could not be a prompt was refused before."""

        async def wrapped(message: Message) -> None:
            self._bodies.release(held)
            await send(message)

        return wrapped

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


def _headers(scope: Scope) -> dict[str, str]:
    """Header values by lower-case name; a Host or Origin sent twice is refused."""
    out: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in out and key in ("host", "origin", "authorization", "content-type"):
            raise ApiError(400, f"The header {key!r} was sent twice.")
        out[key] = value.decode("latin-1")
    return out


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if error.status in (408, 413, 503):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    if error.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
