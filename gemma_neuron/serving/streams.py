"""Engine events for asyncio: one queue for the answers to one call, cancelled when the reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from gemma_neuron.serving.metrics import Meter
from gemma_neuron.serving.requests import GenerationRequest, TokenEvent
from gemma_neuron.serving.source import TokenSource


class EventStream:
    """Events of several requests in the order they happened; use as `async with`.

    Each request's last event has `finish`; iteration ends after the last of all. Past `seconds` every
    request still running is cancelled and ends with an error that says so.
    """

    def __init__(
        self,
        engine: TokenSource,
        requests: Sequence[GenerationRequest],
        *,
        seconds: float,
        meter: Meter,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._seconds = seconds
        self._meter, self._began = meter, time.monotonic()
        self._deadline = self._began + seconds
        self._last: dict[int, float] = {}
        self._replica: dict[int, int] = {}
        """Where each answer's last token came from."""
        self._running: set[int] = set()

        def deliver(event: TokenEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is the reader
                loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self._sequences = {}
        try:
            for request in requests:
                sequence = engine.submit(request, deliver)
                self._sequences[request.tag] = sequence
                self._running.add(request.tag)
        except BaseException:
            self.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while self._running:
            try:
                # Not wait_for: it loses a cancellation that comes while an event is there to be taken.
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    event = await self._queue.get()
            except TimeoutError:
                text = f"The answer took longer than {self._seconds:g} s."
                late, self._running = sorted(self._running), set()
                for tag in late:
                    self._ended(tag, "timeout")
                    yield TokenEvent(tag=tag, finish="error", error=text)
                return
            if event.tag not in self._running:
                continue  # ended by the reader before the engine knew
            self._measure(event)
            if event.finish is not None:
                self._running.discard(event.tag)
            yield event

    def _measure(self, event: TokenEvent) -> None:
        now = time.monotonic()
        if event.token is not None:
            last = self._last.get(event.tag)
            since = self._began if last is None else last
            self._meter.token(event.replica, now - since, first=last is None)
            self._last[event.tag] = now
            self._replica[event.tag] = event.replica
        if event.finish is not None:
            self._meter.ended(event.replica, now - self._began, event.finish)

    def _ended(self, tag: int, end: str) -> None:
        """An answer that this side ended."""
        replica = self._replica.get(tag, 0)
        self._meter.ended(replica, time.monotonic() - self._began, end)

    def end(self, tag: int) -> None:
        """Take no more of one answer: its text met a stop string."""
        self._running.discard(tag)
        self._ended(tag, "stop string")
        self._engine.cancel(self._sequences[tag])

    def close(self) -> None:
        """Cancel whatever still runs: its reader has left."""
        for tag in self._running:
            self._ended(tag, "left")
        self._running = set()
        for sequence in self._sequences.values():
            self._engine.cancel(sequence)
