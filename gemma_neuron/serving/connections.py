"""Connections of clients that do nothing: half-open ones and those that do not read are closed, and there are never
too many.

uvicorn itself waits for ever for a request's head and for a reader. A body that does not come is `access`' affair.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""From connecting, or from the last answer, to a whole request head."""
SEND_SECONDS = 60.0
"""For a client to take what has been written to it, some 64 KiB."""
MOST_CONNECTIONS = 4096
DESCRIPTORS_BESIDE = 256
"""Files and sockets the server needs for itself."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with a limit on the time and the number of those without a request."""

    _watch: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MOST_CONNECTIONS:
            self._make_room()
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

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

    def _make_room(self) -> None:
        """Close one that waits without a request; where all are busy, this one is one more."""
        for other in self.connections:
            if isinstance(other, Connection) and other.idle and other.transport is not None:
                other.connections.discard(other)
                other.transport.abort()
                return


def allow_descriptors() -> None:
    """Raise the soft limit of open files, 1,024 on most systems, to what the connections may need."""
    wanted = MOST_CONNECTIONS + DESCRIPTORS_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
