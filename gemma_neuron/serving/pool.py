"""Requests over replicas that may die: a `TokenSource`.

Requests wait here, and a replica is given no more than it has slots and one to follow. When a replica is lost, what
waited for it or had shown nothing begins again elsewhere; an answer under way goes on by reading its prompt and passing
the tokens told so far through the decode graph, so that each token comes once and is the one it would have been.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma_neuron.serving.grammar import GrammarError, Grammars
from gemma_neuron.serving.links import Link, Ticket
from gemma_neuron.serving.requests import (
    GenerationRequest,
    Grammar,
    Limits,
    ReplicaState,
    TokenEvent,
)
from gemma_neuron.serving.source import MAX_WAITING, Deliver, NotServing, Phase

AFFINITIES = 4096
"""Beginnings of prompts of which is known where they were read last."""


class Pool:
    """The requests' side. What keeps the replicas calls `joined`, `heard`, `lost` and `fail`, from its own threads."""

    def __init__(self, count: int, *, tokenizer_file: Path | None, stop_ids: Iterable[int]) -> None:
        self.limits: Limits | None = None
        self.failure: BaseException | None = None
        self._count = count
        self._tokenizer_file, self._stop_ids = tokenizer_file, frozenset(stop_ids)
        self._grammars: Grammars | None = None
        self._preparing = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._links: dict[int, Link] = {}
        self._starts = [0] * count
        self._down_since = time.monotonic()
        self._waiting: deque[Ticket] = deque()
        self._numbers = itertools.count(1)
        self._read_at: OrderedDict[int, int] = OrderedDict()
        self._final: Phase | None = None
        self._started = self._draining = False

    # --- the face of a TokenSource -------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self._final is not None:
            return self._final
        if self._draining:
            return "draining"
        if any(link.phase == "ready" for link in list(self._links.values())):
            return "ready"
        if self.limits is not None:
            return "recovering"
        return "loading" if self._started else "starting"

    def submit(self, request: GenerationRequest, deliver: Deliver) -> Ticket:
        """See `TokenSource.submit`."""
        with self._changed:
            if self.phase != "ready":
                raise NotServing(f"The server is not ready: {self.phase}.")
            if len(self._waiting) >= MAX_WAITING:
                raise NotServing(f"The queue is full: {MAX_WAITING} requests wait.")
            ticket = Ticket(request, deliver)
            self._waiting.append(ticket)
            self._dispatch()
        return ticket

    def check(self, grammar: Grammar) -> None:
        """See `TokenSource.check`."""
        if self._grammars is None:
            raise GrammarError("This server holds no answer to a schema: it has no tokenizer file.")
        self._grammars.compile(grammar)

    def cancel(self, ticket: Ticket) -> None:
        """See `TokenSource.cancel`."""
        with self._changed:
            if ticket.ended or ticket.cancelled:
                return
            ticket.cancelled = True
            if ticket.link is None:
                self._waiting.remove(ticket)
                self._end(ticket, TokenEvent(tag=ticket.request.tag, finish="cancelled"))
            else:
                ticket.link.send(("cancel", ticket.number))

    def waiting(self) -> int:
        """See `TokenSource.waiting`."""
        return len(self._waiting)

    def states(self) -> list[ReplicaState]:
        """See `TokenSource.states`."""
        with self._changed:
            return [self._state(index) for index in range(self._count)]

    def _state(self, index: int) -> ReplicaState:
        restarts = max(self._starts[index] - 1, 0)
        if index in self._links:
            return self._links[index].state(restarts)
        seconds = round(time.monotonic() - self._down_since, 3)
        return ReplicaState(index=index, pid=0, phase="down", seconds=seconds, restarts=restarts)

    def drain(self, seconds: float) -> bool:
        """See `TokenSource.drain`."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._busy(), seconds)

    def _busy(self) -> bool:
        return bool(self._waiting) or any(link.tickets for link in self._links.values())

    # --- what happens to replicas --------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """A replica has been started."""
        with self._changed:
            self._links[link.index] = link
            self._starts[link.index] += 1
            self._changed.notify_all()

    def heard(self, link: Link, message: Any) -> None:
        """A message of a replica."""
        kind, *rest = message
        if kind == "loaded":
            self._prepare(rest[0])
        with self._changed:
            if self._links.get(link.index) is not link:
                return
            if kind == "loaded":
                self.limits = link.limits = rest[0]
                link.enter("ready")
            elif kind == "events":
                link.load = rest[1]
                for number, event in rest[0]:
                    self._told(link, number, event)
            self._dispatch()
            self._changed.notify_all()

    def _prepare(self, limits: Limits) -> None:
        """What holds answers to schemas, before a replica counts as ready."""
        with self._preparing:
            if self._grammars is None and self._tokenizer_file is not None:
                grammars = Grammars(self._tokenizer_file, limits.vocab, self._stop_ids)
                grammars.prepare()
                self._grammars = grammars

    def _told(self, link: Link, number: int, event: TokenEvent) -> None:
        ticket = link.tickets.get(number)
        if ticket is None:
            return
        if event.finish is not None:
            del link.tickets[number]
            ticket.link = None
        ticket.tell(event)

    def lost(self, link: Link, why: str) -> None:
        """A replica is gone: its requests move, those that were first among them first."""
        with self._changed:
            if self._links.get(link.index) is link:
                del self._links[link.index]
                self._down_since = time.monotonic()
            link.enter("down")
            link.close()
            tickets, link.tickets = list(link.tickets.values()), {}
            slots = link.limits.slots if link.limits is not None else 0
            for place, ticket in reversed(list(enumerate(tickets))):
                may_move = ticket.moved(begun=place < slots)  # it takes them in their order
                tag = ticket.request.tag
                if ticket.cancelled:
                    self._end(ticket, TokenEvent(tag=tag, finish="cancelled"))
                elif not may_move:
                    text = f"The answer could not be made, three replicas went down over it: {why}"
                    self._end(ticket, TokenEvent(tag=tag, finish="error", error=text))
                else:
                    self._waiting.appendleft(ticket)
            self._dispatch()
            self._changed.notify_all()

    def end_all(self) -> None:
        """Take nothing new, and end what waits or runs as cancelled."""
        with self._changed:
            self._draining = True
            tickets, self._waiting = list(self._waiting), deque()
            for link in self._links.values():
                for number in link.tickets:
                    link.send(("cancel", number))
                tickets += link.tickets.values()
                link.tickets = {}
            for ticket in tickets:
                self._end(ticket, TokenEvent(tag=ticket.request.tag, finish="cancelled"))

    def fail(self, error: BaseException | None, phase: Phase) -> None:
        """Nothing is served any more; everyone who waits is told."""
        with self._changed:
            self.failure = self.failure or error
            self._final = phase
            tickets = list(self._waiting)
            for link in self._links.values():
                tickets += link.tickets.values()
                link.tickets = {}
                link.close()
            self._links.clear()
            self._waiting.clear()
            for ticket in tickets:
                tag = ticket.request.tag
                text = f"The server stopped: {error}"
                ended = TokenEvent(tag=tag, finish="error", error=text)
                self._end(ticket, TokenEvent(tag=tag, finish="cancelled") if not error else ended)
            self._changed.notify_all()

    def _end(self, ticket: Ticket, event: TokenEvent) -> None:
        ticket.link = None
        ticket.tell(event)
        self._changed.notify_all()

    # --- who goes where ------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give waiting requests to replicas that have room, in order."""
        while self._waiting:
            link = self._place_for(self._waiting[0])
            if link is None:
                return
            ticket = self._waiting.popleft()
            ticket.link, ticket.number = link, next(self._numbers)
            link.tickets[ticket.number] = ticket
            link.send(("submit", ticket.number, ticket.again()))

    def _place_for(self, ticket: Ticket) -> Link | None:
        """The replica with the fewest requests; of about equal ones, the one that has read this prompt's beginning."""
        open_links = [link for link in self._links.values() if link.takes(ticket)]
        if not open_links:
            return None
        best = min(open_links, key=lambda link: (len(link.tickets), link.index))
        borders = self._borders(ticket.request)
        known = next((self._read_at[key] for key in borders if key in self._read_at), None)
        for link in open_links:
            if link.index == known and len(link.tickets) <= len(best.tickets) + 1:
                best = link
        for key in borders:
            self._read_at[key] = best.index
            self._read_at.move_to_end(key)
        while len(self._read_at) > AFFINITIES:
            self._read_at.popitem(last=False)
        return best

    def _borders(self, request: GenerationRequest) -> list[int]:
        """Names of the prompt's beginnings up to each chunk's border, longest first."""
        chunk = self.limits.chunk if self.limits is not None else 0
        names: list[int] = []
        if self._count > 1 and chunk > 0:
            ids, name = request.prompt_ids, 0
            for end in range(chunk, len(ids) + 1, chunk):
                name = hash((name, ids[end - chunk : end]))
                names.append(name)
        return names[::-1]
