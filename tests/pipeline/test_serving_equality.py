"""A compiled port under the serving engine: what a slot holds is reused, and the bits are those of reading it."""

from __future__ import annotations

import random
from pathlib import Path

from gemma_neuron.pipeline import open_port, runner_factory
from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.requests import GenerationRequest
from tests.serving.engines import Collected, ask


def conversations(vocab: int, context: int) -> list[GenerationRequest]:
    """Turns of three conversations whose prompts pass a chunk's border and the window."""
    out = []
    for seed in range(3):
        rng = random.Random(seed)
        history = [2, *(rng.randrange(110, vocab) for _ in range(context // 2))]
        for turn in range(3):
            out.append(ask(history, max_tokens=6, temperature=1.0, seed=turn))
            history = history + [rng.randrange(110, vocab) for _ in range(4)]
    return out


def test_turns_are_equal_alone_in_a_batch_and_with_their_beginning_reused(port: Path) -> None:
    opened = open_port(port)
    assert opened.spec is not None
    requests = conversations(opened.geometry.vocab, opened.spec.max_context)
    found = {}
    for reuse in (False, True):
        engine = Engine(runner_factory(opened), reuse_prefixes=reuse)
        engine.start()
        assert engine.wait_loaded(120), engine.failure
        found[reuse] = [Collected(engine, request).wait()[0] for request in requests]
        waiting = [Collected(engine, request) for request in requests]
        assert [one.wait()[0] for one in waiting] == found[reuse]
        reused = engine.states()[0].load.prefix_tokens
        engine.close()
        assert (reused > 0) is reuse
    assert found[True] == found[False]
