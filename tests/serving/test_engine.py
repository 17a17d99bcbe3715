"""The engine over a fake runner: alone equals in a batch, nothing leaks, everything ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from gemma_neuron.errors import CompileError
from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.requests import GenerationRequest
from gemma_neuron.serving.source import NotServing
from tests.serving.engines import Collected, ask, by_hand, random_requests, started
from tests.serving.fake_runner import FakeRunner


def test_alone_equals_in_a_full_batch_equals_the_definition() -> None:
    requests = random_requests(60)
    with started(FakeRunner()) as engine:
        alone = [Collected(engine, request).wait()[0] for request in requests]
    with started(FakeRunner(slots=3)) as engine:
        waiting = [Collected(engine, request) for request in requests]
        together = [one.wait()[0] for one in waiting]
    assert alone == together == [by_hand(request) for request in requests]


def test_running_streams_are_delayed_by_one_chunk_at_most() -> None:
    runner = FakeRunner(buckets=(16,), step_seconds=0.002)
    with started(runner) as engine:
        stream = Collected(engine, ask([2, 110], max_tokens=60))
        stream.events.get(timeout=30)
        Collected(engine, ask([2] + [200] * 160, max_tokens=1)).wait()
        stream.wait()
    names = [name for name, _ in runner.calls]
    chunks = [i for i, name in enumerate(names) if name == "prefill"][1:]
    assert len(chunks) == 11
    assert all(names[i + 1] == "decode" for i in chunks)


def test_chunk_borders_come_from_the_prompt_alone() -> None:
    runner = FakeRunner(buckets=(8, 16))
    with started(runner) as engine:
        Collected(engine, ask([2] + [200] * 36, max_tokens=1)).wait()
    assert runner.calls == [("prefill", 16), ("prefill", 16), ("prefill", 5)]


def test_ends_at_stop_ids_at_max_tokens_and_at_the_context() -> None:
    with started(FakeRunner(script=[120, 121, 106, 122])) as engine:
        tokens, last = Collected(engine, ask([2], stop=(1, 106))).wait()
        assert (tokens, last.finish, last.token) == ([120, 121, 106], "stop", 106)
        tokens, last = Collected(engine, ask([2], stop=(), max_tokens=2)).wait()
        assert (tokens, last.finish) == ([120, 121], "length")
    with started(FakeRunner(max_context=32)) as engine:
        tokens, last = Collected(engine, ask([2] * 30, max_tokens=99)).wait()
        assert (len(tokens), last.finish) == (2, "length")
        tokens, last = Collected(engine, ask([2] * 31, max_tokens=99)).wait()
        assert (len(tokens), last.finish) == (1, "length")


def test_banned_ids_never_come() -> None:
    with started(FakeRunner(script=[300]), banned=(300, 9999)) as engine:
        assert 300 not in Collected(engine, ask([2])).wait()[0]


def test_prompt_logprobs_are_those_of_the_prompt_read_token_by_token() -> None:
    prompt = [2, *range(200, 240)]
    request = GenerationRequest(
        prompt_ids=tuple(prompt),
        max_tokens=0,
        stop_ids=frozenset(),
        logprobs=2,
        prompt_logprobs=True,
    )
    with started(FakeRunner()) as engine:
        one = Collected(engine, request)
        told = one.events.get(timeout=30).prompt
        assert one.events.get(timeout=30).finish == "length"
    assert told is not None
    assert [entry.token for entry in told] == prompt
    assert told[0].logprob is None
    runner = FakeRunner(slots=1)
    for i in range(1, len(prompt)):
        row = runner.prefill([prompt[i - 1]], slot=0, start=i - 1).astype(np.float64)
        assert told[i].logprob == pytest.approx(row[prompt[i]] - np.log(np.exp(row).sum()))
        assert told[i].top[0][0] == int(row.argmax())


def test_cancel_frees_the_slot_and_ends_the_request() -> None:
    with started(FakeRunner(slots=1, step_seconds=0.002)) as engine:
        long = Collected(engine, ask([2, 150], max_tokens=200))
        queued = Collected(engine, ask([2, 151], max_tokens=200))
        next_up = Collected(engine, ask([2, 152], max_tokens=3))
        long.events.get(timeout=30)
        engine.cancel(queued.sequence)
        assert queued.wait()[1].finish == "cancelled"
        engine.cancel(long.sequence)
        assert long.wait()[1].finish == "cancelled"
        assert next_up.wait()[0] == by_hand(ask([2, 152], max_tokens=3))
        engine.cancel(next_up.sequence)  # after its end: nothing happens


def test_cancel_storm_leaves_a_sound_engine() -> None:
    requests = random_requests(40)
    with started(FakeRunner(step_seconds=0.0005)) as engine:
        waiting = [Collected(engine, request) for request in requests]
        for one in waiting[::2]:
            time.sleep(0.001)
            engine.cancel(one.sequence)
        for one, request in zip(waiting[1::2], requests[1::2], strict=True):
            assert one.wait()[0] == by_hand(request)
        for one in waiting[::2]:
            assert one.wait()[1].finish in ("cancelled", "length")


def test_failure_of_the_runner_ends_every_request_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = FakeRunner(slots=1)
    runner.fail_after = 5
    with started(runner) as engine:
        waiting = [Collected(engine, ask([2, i], max_tokens=50)) for i in range(110, 114)]
        for one in waiting:
            event = one.wait()[1]
            assert event.finish == "error"
            assert "RuntimeError: device lost" in event.error
        assert engine.phase == "failed"
        with pytest.raises(NotServing, match="failed"):
            Collected(engine, ask([2]))
    assert "device lost" in caplog.text


def test_not_finite_logits_end_one_request_only() -> None:
    class Sick(FakeRunner):
        def _logits(self, slot: int) -> NDArray[np.float32]:
            row = super()._logits(slot)
            if 599 in self._history[slot]:
                row[3] = np.nan
            return row

    with started(Sick()) as engine:
        sick = Collected(engine, ask([2, 599]))
        sound = Collected(engine, ask([2, 150], max_tokens=3))
        event = sick.wait()[1]
        assert event.finish == "error"
        assert "not finite" in event.error
        assert len(sound.wait()[0]) == 3


def test_loading_fails_with_the_factorys_own_error() -> None:
    def factory() -> FakeRunner:
        raise CompileError("no graph")

    engine = Engine(factory)
    engine.start()
    assert not engine.wait_loaded(30)
    assert isinstance(engine.failure, CompileError)
    assert engine.phase == "failed"
    engine.close()


def test_drain_lets_running_requests_end_and_takes_no_new_ones() -> None:
    with started(FakeRunner(step_seconds=0.002)) as engine:
        one = Collected(engine, ask([2, 150], max_tokens=40))
        one.events.get(timeout=30)
        done = threading.Thread(target=engine.drain, args=(30.0,))
        done.start()
        while engine.phase != "draining":
            time.sleep(0.001)
        with pytest.raises(NotServing, match="draining"):
            Collected(engine, ask([2]))
        done.join()
        tokens, last = one.wait()
        assert (len(tokens), last.finish) == (39, "length")  # the first was taken above


def test_close_cancels_what_runs() -> None:
    with started(FakeRunner(step_seconds=0.002)) as engine:
        one = Collected(engine, ask([2, 150], max_tokens=200))
        one.events.get(timeout=30)
    assert one.wait()[1].finish == "cancelled"


def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_neuron.serving.engine.MAX_WAITING", 2)
    with started(FakeRunner(slots=1, step_seconds=0.01)) as engine:
        waiting = [Collected(engine, ask([2, 150], max_tokens=20))]
        waiting[0].events.get(timeout=30)
        waiting += [Collected(engine, ask([2, 151], max_tokens=2)) for _ in range(2)]
        with pytest.raises(NotServing, match="queue is full"):
            Collected(engine, ask([2]))
        assert all(one.wait()[1].finish == "length" for one in waiting)
