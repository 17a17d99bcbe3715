"""Who may talk to the server: host, origin, key, content type, size and time of a body.

Plain ASGI, before any framework code. Loopback is no boundary: any web page in the user's browser can
send requests there, which the Host and Origin checks refuse (DNS rebinding, cross-site posts).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
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
    """`hosts` None accepts any Host header: for a server bound to all addresses behind its key. `addresses` accepts any
    address: a page that rebinds its name to the server's address makes a browser ask by that name."""

    hosts: frozenset[str] | None = LOOPBACK_NAMES
    addresses: bool = False
    api_key: str | None = None
    bodies: BodyLimits = field(default_factory=BodyLimits)


class _Answer:
    """What the application sends. From its first byte on the request's body counts no more: what could be no prompt was
    refused before."""

    def __init__(self, send: Send, held: Held, bodies: Bodies) -> None:
        self._send, self._held, self._bodies = send, held, bodies
        self.begun = False

    async def send(self, message: Message) -> None:
        self.begun = True
        self._bodies.release(self._held)
        await self._send(message)


class AccessGuard:
    """ASGI middleware that answers what the rules refuse, in OpenAI's error shape. `refused` is told each status."""

    def __init__(
        self, app: App, rules: AccessRules, refused: Callable[[int], None] = lambda _: None
    ) -> None:
        self._app = app
        self._rules = rules
        self._bodies = Bodies(rules.bodies)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.holding() as held:
            answer = _Answer(send, held, self._bodies)
            try:
                try:
                    allowed = await self._allowed(held, scope, receive)
                except ApiError as error:
                    self._refused(error.status)
                    await _refuse(answer.send, error)
                    return
                await self._app(scope, allowed, answer.send)
            except asyncio.CancelledError:  # by uvicorn, where the server ends
                if answer.begun:
                    raise
                await _refuse(send, ApiError(503, "The server is shutting down.", code="not_ready"))

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

    def _check_host(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if not self._is_ours(host_name(host)):
            raise ApiError(
                403,
                f"The Host header {host[:200]!r} is not one of this server's names; --allow-host adds one.",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, f"Requests from the origin {origin[:200]!r} are not accepted.")

    def _is_ours(self, name: str) -> bool:
        hosts = self._rules.hosts
        return hosts is None or name in hosts or (self._rules.addresses and _is_address(name))

    def _check_key(self, scope: Scope, headers: dict[str, str]) -> None:
        key = self._rules.api_key
        if key is None or open_to_all(scope["path"]):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip(" ").encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not right:
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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
