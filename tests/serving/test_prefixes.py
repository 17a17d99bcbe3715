"""What a slot still holds of a prompt is not read again, and what was told before is not told again: same tokens."""

from __future__ import annotations

import random

import pytest

from gemma_neuron.serving.requests import GenerationRequest
from tests.serving.engines import Collected, ask, by_hand, random_requests, started
from tests.serving.fake_runner import FakeRunner


def conversation(seed: int, turns: int = 5) -> list[GenerationRequest]:
    """Each turn's prompt: the one before, its answer, and something new."""
    rng = random.Random(seed)
    history, out = [2], []
    for turn in range(turns):
        history += [rng.randrange(110, 600) for _ in range(rng.randrange(5, 40))]
        request = ask(history, max_tokens=6, temperature=1.0, seed=turn)
        out.append(request)
        history = history + by_hand(request)
    return out


RINGS = [(None, True), (16, True), (40, True), (40, False), (16, False)]


@pytest.mark.parametrize(("ring", "copies"), RINGS)
def test_turns_of_conversations_are_equal_with_and_without_reuse(
    ring: int | None, copies: bool
) -> None:
    talks = [conversation(seed) for seed in range(3)]
    runner = FakeRunner(slots=3, max_context=400, buckets=(8, 16), ring=ring, copies=copies)
    with started(runner) as engine:
        for turn in zip(*talks, strict=True):
            waiting = [Collected(engine, request) for request in turn]
            for one, request in zip(waiting, turn, strict=True):
                assert one.wait()[0] == by_hand(request)
        saved = engine.states()[0].load.prefix_tokens
    read = sum(size for name, size in runner.calls if name == "prefill")
    prompts = sum(len(request.prompt_ids) for talk in talks for request in talk)
    assert read + saved == prompts
    assert saved > prompts / 3 if copies or ring is None else saved < prompts / 3


def test_reuse_can_be_switched_off() -> None:
    runner = FakeRunner(slots=1, max_context=400)
    with started(runner, reuse_prefixes=False) as engine:
        for request in conversation(1):
            assert Collected(engine, request).wait()[0] == by_hand(request)
        assert engine.states()[0].load.prefix_tokens == 0


def test_a_scored_prompt_neither_takes_nor_leaves_a_prefix() -> None:
    prompt = (2, *range(200, 260))
    scored = GenerationRequest(
        prompt_ids=prompt, max_tokens=2, stop_ids=frozenset(), logprobs=0, prompt_logprobs=True
    )
    with started(FakeRunner(slots=1)) as engine:
        for request in (ask([*prompt]), scored, ask([*prompt]), ask([*prompt])):
            Collected(engine, request).wait()
        assert engine.states()[0].load.prefix_tokens == 32


def test_an_answer_goes_on_from_any_token_it_had_reached() -> None:
    for request in random_requests(20):
        whole = by_hand(request)
        with started(FakeRunner()) as engine:
            for told in {0, 1, len(whole) // 2, len(whole) - 1}:
                replayed = GenerationRequest(
                    prompt_ids=request.prompt_ids,
                    max_tokens=request.max_tokens,
                    stop_ids=request.stop_ids,
                    sampling=request.sampling,
                    replay=tuple(whole[:told]),
                )
                assert Collected(engine, replayed).wait()[0] == whole[told:]
