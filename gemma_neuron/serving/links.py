"""One running replica and one request on its way, as the controller sees them."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from gemma_neuron.serving.requests import GenerationRequest, Limits, Load, ReplicaState, TokenEvent
from gemma_neuron.serving.source import Deliver

FRUITLESS_MOVES = 3
"""A request that was on three replicas when they went down, and got no further on any, is what takes them down. The
third time it is alone, so that it takes no other request with it."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request, what has been told of its answer, and how often it had to move without getting on."""

    request: GenerationRequest
    deliver: Deliver
    told: list[int] = field(default_factory=list)
    prompt_told: bool = False
    link: Link | None = None
    number: int = 0
    cancelled: bool = False
    ended: bool = False
    moves: int = 0
    told_when_moved: int = -1

    def again(self) -> GenerationRequest:
        """The request for the replica that takes it now: it goes on where the answer stands."""
        return replace(self.request, replay=tuple(self.told)) if self.told else self.request

    def tell(self, event: TokenEvent) -> None:
        """Pass an event on, once."""
        if self.ended:
            return
        if event.prompt is not None:
            if self.prompt_told:
                return
            self.prompt_told = True
        if event.token is not None:
            self.told.append(event.token)
        self.ended = event.finish is not None
        self.deliver(event)

    @property
    def suspect(self) -> bool:
        """Two replicas went down over it, or beside it, and it has not got on since."""
        return self.moves == FRUITLESS_MOVES - 1 and len(self.told) == self.told_when_moved

    def moved(self, begun: bool) -> bool:
        """Its replica is gone, which had `begun` it; whether it may try another."""
        self.link = None
        if not begun:
            return True
        on = len(self.told) > self.told_when_moved
        self.moves, self.told_when_moved = 1 if on else self.moves + 1, len(self.told)
        return self.moves < FRUITLESS_MOVES


class Link:
    """A replica's connection. A thread reads it, another writes: no write waits for a replica that stands still."""

    def __init__(self, index: int, pid: int) -> None:
        self.index, self.pid = index, pid
        self.phase: Literal["starting", "loading", "ready", "down"] = "starting"
        self.since = time.monotonic()
        self.limits: Limits | None = None
        self.load = Load()
        self.tickets: dict[int, Ticket] = {}
        self.down = threading.Event()
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection: Connection | None = None

    def enter(self, phase: Literal["starting", "loading", "ready", "down"]) -> None:
        self.phase, self.since = phase, time.monotonic()
        if phase == "down":
            self.down.set()

    def takes(self, ticket: Ticket) -> bool:
        """Whether it has room: for as many as it has slots and one more, for a suspect only where it is alone."""
        if self.phase != "ready" or self.limits is None:
            return False
        if ticket.suspect or any(other.suspect for other in self.tickets.values()):
            return not self.tickets
        return len(self.tickets) <= self.limits.slots

    def attach(
        self,
        connection: Connection,
        heard: Callable[[Link, Any], None],
        gone: Callable[[Link], None] = lambda _: None,
    ) -> None:
        """The replica has called; `heard` is given each of its messages, in a thread of this link, which calls `gone`
        when there are no more."""
        self._connection = connection
        name = f"replica-{self.index}"
        threading.Thread(
            target=self._talk, args=(connection, heard, gone), name=name, daemon=True
        ).start()

    @property
    def attached(self) -> bool:
        """Whether the replica has called: from then on it loads, and hears what is sent when it has."""
        return self._connection is not None

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def close(self) -> None:
        """End both threads, whatever they wait for; the replica's process is the keeper's affair."""
        self._outgoing.put(None)
        if self._connection is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def state(self, restarts: int) -> ReplicaState:
        return ReplicaState(
            index=self.index,
            pid=self.pid,
            phase=self.phase,
            seconds=round(time.monotonic() - self.since, 3),
            restarts=restarts,
            load=self.load,
        )

    def _talk(
        self,
        connection: Connection,
        heard: Callable[[Link, Any], None],
        gone: Callable[[Link], None],
    ) -> None:
        writer = threading.Thread(target=self._write, args=(connection,), daemon=True)
        writer.start()
        with suppress(EOFError, OSError):
            while True:
                heard(self, connection.recv())
        gone(self)
        self._outgoing.put(None)
        writer.join()
        connection.close()

    def _write(self, connection: Connection) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                connection.send(message)
