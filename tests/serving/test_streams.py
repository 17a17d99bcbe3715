"""How answers are counted that this side ends, and what a replica keeps of those that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httpx2

from gemma_neuron.serving.connections import SEND_SECONDS, Connection
from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.metrics import Meter
from gemma_neuron.serving.replica import _Talk
from gemma_neuron.serving.requests import GenerationRequest, TokenEvent
from gemma_neuron.serving.source import Deliver, TokenSource
from gemma_neuron.serving.streams import EventStream
from tests.serving.engines import ask
from tests.serving.server import RunningServer
from tests.serving.test_metrics import metric, read


class OneToken:
    """A source of one token for each request, from replica 3."""

    def submit(self, request: GenerationRequest, deliver: Deliver) -> int:
        deliver(TokenEvent(tag=request.tag, token=5, replica=3))
        return request.tag

    def cancel(self, handle: object) -> None:
        pass

    def states(self) -> list[Any]:
        return []

    def waiting(self) -> int:
        return 0


def told(use: Callable[[EventStream], Any], seconds: float = 20.0) -> str:
    """The metrics after `use` was given a stream that has one token."""
    source = cast("TokenSource", OneToken())
    meter = Meter(source)

    async def run() -> None:
        stream = EventStream(source, [ask([2, 3])], seconds=seconds, meter=meter)
        async with stream:
            async for event in stream:
                if event.token is not None and use(stream):
                    break

    asyncio.run(run())
    return meter.text().decode()


def test_an_answer_that_met_a_stop_string_is_its_replicas() -> None:
    text = told(lambda stream: stream.end(0))
    assert metric(text, "request_seconds_count") == {'{replica="3"}': 1}
    assert metric(text, "requests_total") == {'{end="stop string"}': 1}


def test_answers_that_are_late_or_whose_reader_left_are_counted() -> None:
    assert metric(told(lambda _: None, 0.2), "requests_total") == {'{end="timeout"}': 1}
    assert metric(told(lambda _: True), "requests_total") == {'{end="left"}': 1}


def test_what_is_refused_at_the_door_is_counted(free: RunningServer) -> None:
    before = metric(read(free), "refused_requests_total").get('{status="403"}', 0.0)
    headers = {"host": "evil.example"}
    assert httpx2.get(f"{free.url}/v1/models", headers=headers).status_code == 403
    assert metric(read(free), "refused_requests_total")['{status="403"}'] == before + 1


def test_a_replica_keeps_nothing_of_a_request_that_ended_before_it_was_known() -> None:
    class Quick:
        def submit(self, request: GenerationRequest, deliver: Deliver) -> object:
            deliver(TokenEvent(tag=request.tag, finish="stop"))
            return object()

    talk = _Talk(cast("Any", None))
    talk._submit(cast("Engine", Quick()), 1, ask([2, 3]))
    assert talk._sequences == {}
    assert [number for number, _ in talk._events] == [1]


def test_a_slow_reader_has_as_long_as_it_takes_something() -> None:
    class Transport:
        sizes = [300, 200, 100, 100]  # noqa: RUF012 - used up
        aborted = False

        def get_write_buffer_size(self) -> int:
            return self.sizes.pop(0)

        def abort(self) -> None:
            self.aborted = True

    class Clock:
        """Time passes as fast as it is waited for."""

        waited = 0.0

        def call_later(self, seconds: float, function: Callable[..., None], *given: Any) -> None:
            self.waited += seconds
            function(*given)

    connection, transport, clock = Connection.__new__(Connection), Transport(), Clock()
    connection.transport, connection.loop = cast("Any", transport), cast("Any", clock)
    connection._await_reader(transport.get_write_buffer_size())
    assert transport.aborted
    assert clock.waited == 3 * SEND_SECONDS
