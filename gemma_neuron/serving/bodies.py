"""Request bodies as they arrive: size, time and number of values of each, and the bytes of all together.

What is past a limit is an ApiError for the client that sent it. Where all bodies together are too many bytes, the
largest that has not arrived whole makes room, so that clients with small ones are served whatever others send.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gemma_neuron.serving.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MAX_VALUES = 2**18
"""Of one body: two prompts of ids as long as the longest context. Each costs far more to parse than its bytes say."""
JSON_PIECES = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([,\[{])', re.DOTALL)
"""Strings, and in a group of its own what begins a value."""
DISCARDED_BYTES = 64 * 2**20
DISCARD_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Of one body: `body_bytes`, and `body_seconds` to arrive; `held_bytes`: of all whose answer has not begun."""

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    held_bytes: int = 32 * 2**20


@dataclass(eq=False, slots=True)
class Held:
    """One body, as far as it is here."""

    data: bytearray = field(default_factory=bytearray)
    counted: int = 0
    whole: bool = False
    evicted: bool = False
    timeout: asyncio.Timeout | None = None


class Bodies:
    """The bodies of one server. Used on its event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held: set[Held] = set()
        self.held_bytes = 0

    @contextmanager
    def holding(self) -> Iterator[Held]:
        """A body to `read` into; it counts until it is left or `release`d."""
        held = Held()
        self._held.add(held)
        try:
            yield held
        finally:
            self.release(held)

    def release(self, held: Held) -> None:
        """The request is past the point where its body counts."""
        self._held.discard(held)
        self.held_bytes -= held.counted
        held.counted = 0

    async def read(self, held: Held, headers: dict[str, str], receive: Receive) -> bytes:
        """The whole body. Raises ApiError 400, 408, 413 or 503, with what is left of it read and dropped."""
        limit = self._limits.body_bytes
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await discard_body(receive)
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._limits.body_seconds) as held.timeout:
                while not held.whole:
                    await self._read_piece(held, receive)
        except TimeoutError:
            if held.evicted:
                await discard_body(receive)
                raise _too_many() from None
            raise ApiError(
                408, f"The request body took longer than {self._limits.body_seconds:g} s."
            ) from None
        data = bytes(held.data)
        held.data.clear()
        if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
            await asyncio.to_thread(_refuse_many_values, data)
        return data

    async def _read_piece(self, held: Held, receive: Receive) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client left before its request was complete.")
        piece: bytes = message.get("body", b"")
        more = bool(message.get("more_body", False))
        refused = None
        if len(held.data) + len(piece) > self._limits.body_bytes:
            refused = _too_large(self._limits.body_bytes)
        elif held.evicted or not self._count(held, len(piece)):
            refused = _too_many()
        if refused is not None:
            if more:
                await discard_body(receive)
            raise refused
        held.data += piece
        held.whole = not more

    def _count(self, held: Held, more: int) -> bool:
        """Count what came; False where it is this body that has to make room."""
        held.counted += more
        self.held_bytes += more
        while self.held_bytes > self._limits.held_bytes:
            largest = max(
                (other for other in self._held if not other.whole), key=lambda other: other.counted
            )
            self.release(largest)
            largest.evicted = True
            largest.data.clear()
            if largest is held:
                return False
            if largest.timeout is not None:
                largest.timeout.reschedule(asyncio.get_running_loop().time())
        return True


def _refuse_many_values(data: bytes) -> None:
    """Raise ApiError where the JSON has too many values; commas within strings are none."""
    found = 0
    for piece in JSON_PIECES.finditer(data):
        found += piece[1] is not None
        if found > MAX_VALUES:
            raise ApiError(400, f"The body holds more than {MAX_VALUES} values.")


async def discard_body(receive: Receive) -> None:
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


def replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once and then waits for the client to leave."""
    given = [body]

    async def wrapped() -> Message:
        if not given:
            return await receive()
        return {"type": "http.request", "body": given.pop(), "more_body": False}

    return wrapped


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.")


def _too_many() -> ApiError:
    text = "The server holds as many bytes of request bodies as it may; smaller ones go first."
    return ApiError(503, text, code="too_many_bytes")
