"""Connections of clients that do nothing: half-open ones and those that do not read are closed, and there are never
too many, for this server or for the descriptors it may open.

uvicorn itself waits for ever for a request's head and for a reader. A body that does not come is `access`' affair.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_SECONDS = 20.0
"""From connecting, or from the last answer, to a whole request head."""
SEND_SECONDS = 60.0
"""For a client to take anything of what has been written to it."""
MOST_CONNECTIONS = 4096
BACKLOG = 256
"""Connections that the event loop may accept in one go, before it looks at the first of them."""
DESCRIPTORS_BESIDE = 256 + 2 * BACKLOG
"""Files and sockets the server needs for itself, and connections just accepted and just closed."""


class Lobby:
    """Connections without a request, in the order in which they make room: those that never sent a byte, those whose
    first request has not come whole, those whose requests were answered; of each the one that waits longest."""

    def __init__(self) -> None:
        self._kinds: tuple[OrderedDict[Connection, None], ...] = tuple(
            OrderedDict() for _ in range(3)
        )

    def enter(self, connection: Connection, kind: int) -> None:
        """`kind`: 0 silent, 1 begun, 2 answered."""
        self.leave(connection)
        self._kinds[kind][connection] = None

    def leave(self, connection: Connection) -> None:
        for kind in self._kinds:
            kind.pop(connection, None)

    def is_silent(self, connection: Connection) -> bool:
        return connection in self._kinds[0]

    def take(self) -> Connection | None:
        """The one that makes room."""
        kind = next((kind for kind in self._kinds if kind), None)
        return None if kind is None else kind.popitem(last=False)[0]


_LOBBIES: WeakKeyDictionary[ServerState, Lobby] = WeakKeyDictionary()
"""By server: a process may have several."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with a limit on the time and the number of those without a request."""

    allowed: ClassVar[int] = 2**31
    """Connections that there are descriptors for."""
    backlog: ClassVar[int] = BACKLOG
    _watch: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= min(MOST_CONNECTIONS, self.allowed):
            self._make_room()
        super().connection_made(transport)
        self._lobby.enter(self, 0)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._lobby.is_silent(self):
            self._lobby.enter(self, 1)
        super().data_received(data)
        if not self.idle:
            self._lobby.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lobby.leave(self)
        self._stop_watch()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self.idle and self in self.connections
        ):  # else the next request was there already, or it is closed
            self._lobby.enter(self, 2)
        self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _await_reader(self, left: int) -> None:
        self._unread = self.loop.call_later(SEND_SECONDS, self._still_unread, left)

    def _still_unread(self, before: int) -> None:
        """A whole answer is one write: a slow line has as long as it takes something."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._await_reader(left)
        else:
            self.transport.abort()

    @property
    def idle(self) -> bool:
        """No request of this connection is being answered."""
        cycle: Any = self.cycle  # None until the first request, which its annotation denies
        return cycle is None or bool(cycle.response_complete)

    def _await_head(self) -> None:
        self._stop_watch()
        self._watch = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _too_late(self) -> None:
        if self.idle and not self.transport.is_closing():
            self.transport.abort()

    @property
    def _lobby(self) -> Lobby:
        return _LOBBIES.setdefault(self.server_state, Lobby())

    def _make_room(self) -> None:
        """Close one that waits without a request; where all are busy, this one is one more."""
        other = self._lobby.take()
        if other is not None:
            other.connections.discard(other)
            other.transport.abort()


def allow_descriptors() -> type[Connection]:
    """Raise the soft limit of open files, 1,024 on most systems, to what the connections may need; the class of
    connections of which there are never more than the limit leaves room for."""
    wanted = MOST_CONNECTIONS + DESCRIPTORS_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = wanted if limit == resource.RLIM_INFINITY else limit

    class Limited(Connection):
        allowed = max(room - DESCRIPTORS_BESIDE, room // 4)
        backlog = min(BACKLOG, room // 8)

    return Limited
