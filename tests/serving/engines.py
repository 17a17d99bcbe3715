"""Engines over a fake runner, and what a request's tokens are by definition."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.requests import GenerationRequest, Sampling, TokenEvent
from gemma_neuron.serving.sampling import choose
from gemma_neuron.serving.source import TokenSource
from tests.serving.fake_runner import FakeRunner


@contextmanager
def started(
    runner: FakeRunner, banned: tuple[int, ...] = (), *, reuse_prefixes: bool = True
) -> Iterator[Engine]:
    engine = Engine(lambda: runner, banned_ids=banned, reuse_prefixes=reuse_prefixes)
    engine.start()
    assert engine.wait_loaded(30)
    try:
        yield engine
    finally:
        engine.close()
    assert runner.closed


class Collected:
    """One request's events as they come."""

    def __init__(self, engine: TokenSource, request: GenerationRequest) -> None:
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.sequence = engine.submit(request, self.events.put)

    def wait(self, seconds: float = 30.0) -> tuple[list[int], TokenEvent]:
        tokens = []
        while True:
            event = self.events.get(timeout=seconds)
            if event.token is not None:
                tokens.append(event.token)
            if event.finish is not None:
                return tokens, event


def ask(
    prompt: list[int], *, max_tokens: int = 12, stop: tuple[int, ...] = (), **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        stop_ids=frozenset(stop),
        sampling=Sampling(**sampling),
    )


def random_requests(count: int) -> list[GenerationRequest]:
    rng = random.Random(1)
    out = []
    for number in range(count):
        prompt = [2, *(rng.randrange(110, 600) for _ in range(rng.randrange(1, 90)))]
        if number % 2:
            settings: dict[str, Any] = {
                "temperature": 1.0,
                "seed": number,
                "choice": number % 3,
                "top_p": 0.9,
            }
        else:
            settings = {"frequency_penalty": 0.5}
        out.append(ask(prompt, max_tokens=rng.randrange(1, 30), **settings))
    return out


def by_hand(request: GenerationRequest) -> list[int]:
    """The answer by the definition: the whole history through a runner with nothing else on it."""
    runner = FakeRunner(slots=1, buckets=(256,))
    logits = runner.prefill(request.prompt_ids, slot=0, start=0)
    made: list[int] = []
    while True:
        counts = {token: made.count(token) for token in made}
        token = choose(
            logits, request.sampling, place=len(made), prompt=request.prompt_ids, counts=counts
        )
        made.append(token)
        if len(made) == request.max_tokens:
            return made
        position = len(request.prompt_ids) + len(made) - 1
        logits = runner.decode([token], [position], [True])[0]
