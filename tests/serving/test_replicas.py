"""Replicas in real processes under real signals: no token lost or doubled, and a replica that comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.errors import CompileError
from gemma_neuron.serving import replica
from gemma_neuron.serving.grammar import Grammars
from gemma_neuron.serving.local import ServeOptions, replica_engine
from gemma_neuron.serving.replica import ReplicaSetup
from gemma_neuron.serving.replicas import Replicas
from gemma_neuron.serving.source import NotServing
from tests.serving.engines import Collected, ask, by_hand, random_requests
from tests.serving.replica_runner import make
from tests.serving.server import running, until, write_port, write_source
from tests.serving.test_local import announced, ended, process

SECONDS = 30.0


@contextmanager
def replicas(
    count: int = 2,
    *,
    silence: float = 10.0,
    step_seconds: float | None = None,
    goodbye: float = 30.0,
    events: EventLog | None = None,
    **runner: Any,
) -> Iterator[Replicas]:
    setup = ReplicaSetup(
        load=partial(make, **runner), silence_seconds=silence, step_seconds=step_seconds
    )
    engine = EmbeddedEngine(preload=[replica.__name__], goodbye_seconds=goodbye)
    found = Replicas(count, setup, engine, events)
    found.start()
    try:
        yield found
    finally:
        found.close(5.0)


def all_ready(pool: Replicas) -> bool:
    return all(state.phase == "ready" for state in pool.states())


def kill(pool: Replicas, index: int, number: signal.Signals = signal.SIGKILL) -> int:
    pid = pool.states()[index].pid
    os.kill(pid, number)
    return pid


def test_answers_are_equal_when_replicas_are_killed_and_stopped_under_them() -> None:
    requests = random_requests(48)
    wanted = [by_hand(request) for request in requests]
    with replicas(silence=1.5, step=0.002) as pool:
        until(lambda: all_ready(pool))
        for number, index in ((signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 0)):
            waiting = [Collected(pool, request) for request in requests]
            waiting[5].events.get(timeout=SECONDS)
            time.sleep(0.05)
            pid = kill(pool, index, number)
            found = [one.wait()[0] for one in waiting]
            assert found[:5] == wanted[:5]
            assert found[5] == wanted[5][1:]  # the first was taken above
            assert found[6:] == wanted[6:]
            until(lambda: all_ready(pool))
            assert not psutil.pid_exists(pid)
        assert sum(state.restarts for state in pool.states()) == 3


def test_both_killed_is_not_ready_and_comes_back_by_itself() -> None:
    request = ask([2, 150, 151], max_tokens=150, temperature=1.0, seed=3)
    with replicas(step=0.003, load=0.4) as pool:
        until(lambda: all_ready(pool))
        one = Collected(pool, request)
        first = one.events.get(timeout=SECONDS)
        for index in range(2):
            kill(pool, index)
        until(lambda: pool.phase == "recovering")
        with pytest.raises(NotServing, match="recovering"):
            pool.submit(request, lambda _: None)
        until(lambda: pool.phase == "ready")
        assert [first.token, *one.wait()[0]] == by_hand(request)


def test_one_replica_pauses_and_goes_on() -> None:
    request = ask([2, 150, 151], max_tokens=120)
    with replicas(1, step=0.003) as pool:
        until(lambda: all_ready(pool))
        one = Collected(pool, request)
        time.sleep(0.1)
        kill(pool, 0)
        assert one.wait()[0] == by_hand(request)


def test_a_request_that_takes_every_replica_down_ends_and_the_others_do_not() -> None:
    requests = [ask([2, 200 + i], max_tokens=20) for i in range(3)]
    with replicas(step=0.002, poison=599) as pool:
        until(lambda: all_ready(pool))
        bad = Collected(pool, ask([2, 599], max_tokens=5))
        good = [Collected(pool, request) for request in requests]
        event = bad.wait()[1]
        assert event.finish == "error"
        assert "device lost" in event.error
        assert [one.wait()[0] for one in good] == [by_hand(request) for request in requests]
        until(lambda: all_ready(pool))


def test_a_step_that_never_ends_is_a_fault() -> None:
    with replicas(1, step_seconds=0.3, step=0.6) as pool:
        until(lambda: all_ready(pool))
        one = Collected(pool, ask([2, 150], max_tokens=3))
        event = one.wait()[1]
        assert event.finish == "error"
        assert "in one step for" in event.error


def test_steps_in_which_no_heartbeat_can_be_sent_are_no_hang() -> None:
    with replicas(1, silence=0.7, holds=1.0) as pool:
        until(lambda: all_ready(pool))
        request = ask([2, 150, 151], max_tokens=3)
        assert Collected(pool, request).wait()[0] == by_hand(request)
        assert [state.restarts for state in pool.states()] == [0]


@pytest.mark.parametrize(
    ("longest", "asked", "silent", "stuck"),
    [
        (0.01, None, 10.0, 60.0),
        (2.0, None, 20.0, 60.0),
        (30.0, None, 300.0, 600.0),
        (30.0, 45.0, 45.0, 45.0),
    ],
)
def test_patience_follows_the_longest_step(
    longest: float, asked: float | None, silent: float, stuck: float
) -> None:
    setup = ReplicaSetup(load=make, step_seconds=asked)
    assert replica.patience(setup, longest) == (silent, stuck)


def test_a_failed_replica_that_does_not_end_keeps_no_other_fault_from_being_seen() -> None:
    """The keeper waits for the first to end, and the second is lost meanwhile."""
    goodbye = 15.0
    request = ask([2, 150, 151], max_tokens=150)
    with replicas(3, goodbye=goodbye, step=0.01, poison=599, lingers=True) as pool:
        until(lambda: all_ready(pool))
        bad = Collected(
            pool, ask([2, 599], max_tokens=3)
        )  # goes to the first, which alone minds it
        until(lambda: bad.sequence.moves > 0)
        good = Collected(pool, request)
        good.events.get(timeout=SECONDS)
        link = good.sequence.link
        assert link is not None
        os.kill(link.pid, signal.SIGKILL)
        assert good.wait(goodbye - 3)[0] == by_hand(request)[1:]


def test_the_server_lets_no_failed_replica_without_a_device_linger() -> None:
    for keeps, seconds in ((False, 1.0), (True, 30.0)):
        assert replica_engine(ServeOptions(keeps_devices=keeps)).goodbye_seconds == seconds


def test_the_time_without_a_replica_ends_when_one_has_loaded() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    events = EventLog(lambda event, facts: told.append((event, facts)))
    with replicas(1, events=events, load=0.6) as pool:
        until(lambda: all_ready(pool))
        kill(pool, 0)
        until(lambda: pool.phase == "recovering")
        until(lambda: "resumed" in [event for event, _ in told])
        assert pool.phase == "ready"
    (resumed,) = [facts for event, facts in told if event == "resumed"]
    assert resumed["downtime_seconds"] > 0.6
    assert resumed["replicas"] == 1


def test_what_holds_answers_to_a_schema_is_made_while_loading(tmp_path: Path) -> None:
    folder = write_source(tmp_path)
    setup = ReplicaSetup(load=make, tokenizer_file=folder / "tokenizer.json")
    pool = Replicas(1, setup, EmbeddedEngine(preload=[replica.__name__]))
    prepared: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammars, "prepare", lambda _: prepared.append(pool.phase))
        pool.start()
        until(lambda: all_ready(pool))
        pool.close(5.0)
        assert prepared == ["loading"]
        with running(folder):
            assert len(prepared) == 2
    grammars = Grammars(folder / "tokenizer.json", 600, [106])
    grammars.prepare()
    assert grammars._tokenizer is not None


def test_loading_that_fails_is_the_loaders_own_error() -> None:
    with replicas(broken=True) as pool:
        until(lambda: pool.phase == "failed")
        assert isinstance(pool.failure, CompileError)


def test_cancelled_requests_free_their_place_on_a_replica() -> None:
    with replicas(1, step=0.002, slots=1) as pool:
        until(lambda: all_ready(pool))
        waiting = [Collected(pool, ask([2, 150 + i], max_tokens=200)) for i in range(6)]
        waiting[0].events.get(timeout=SECONDS)
        for one in waiting[:5]:
            pool.cancel(one.sequence)
        assert [one.wait()[1].finish for one in waiting[:5]] == ["cancelled"] * 5
        assert waiting[5].wait()[0] == by_hand(ask([2, 155], max_tokens=200))


def test_descriptors_and_threads_are_flat_over_recoveries() -> None:
    own = psutil.Process()
    with replicas(1) as pool:
        until(lambda: all_ready(pool))
        before = None
        for round_ in range(12):
            kill(pool, 0)
            until(lambda round_=round_: pool.states()[0].restarts == round_ + 1 and all_ready(pool))  # type: ignore[misc]
            if round_ == 2:
                before = own.num_fds(), threading.active_count()
        time.sleep(0.3)
        assert before is not None
        assert own.num_fds() <= before[0]
        assert threading.active_count() <= before[1]


def test_a_stream_goes_on_over_http_when_its_replica_dies(tmp_path: Any) -> None:
    write_port(tmp_path)
    with process(tmp_path, "replicas=2", "step=0.01", "free=1") as found:
        facts = announced(found)
        assert [r["index"] for r in facts["replicas"]] == [0, 1]
        client = openai.OpenAI(base_url=facts["url"] + "/v1", api_key="none", max_retries=0)
        options: dict[str, Any] = {
            "model": "any",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 1.0,
            "seed": 5,
            "max_tokens": 90,
        }
        with client:
            whole = client.chat.completions.create(**options).choices[0].message.content
            text, killed = "", False
            for chunk in client.chat.completions.create(**options, stream=True):
                text += chunk.choices[0].delta.content or ""
                if len(text) > 20 and not killed:
                    killed = True
                    for state in httpx2.get(facts["url"] + "/health/ready").json()["replicas"]:
                        os.kill(state["pid"], signal.SIGKILL)
            assert killed
            assert text == whole
        found.send_signal(signal.SIGTERM)
        code, errors = ended(found)
        assert (code, "SIGKILL" in errors) == (0, True)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert sum('"worker_died"' in line for line in lines) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_lets_answers_end(tmp_path: Path, number: signal.Signals) -> None:
    """As a service manager sends it that ends a group, or a terminal that is closed: only the server acts on it."""
    write_port(tmp_path)
    with process(tmp_path, "replicas=2", "step=0.02", "free=1") as found:
        url = announced(found)["url"]
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        with client:
            chunks = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=90,
                stream=True,
                stream_options={"include_usage": True},
            )
            next(iter(chunks))
            server = psutil.Process(found.pid)
            for one in [*server.children(recursive=True), *([server] * (number == signal.SIGTERM))]:
                one.send_signal(number)
            last = list(chunks)[-1]
        if number != signal.SIGTERM:
            found.send_signal(signal.SIGTERM)
        code, errors = ended(found)
    assert last.usage is not None and last.usage.completion_tokens == 90
    assert code == 0 and "ended by signal" not in errors


def test_nothing_of_a_killed_server_stays(tmp_path: Any) -> None:
    write_port(tmp_path)
    with process(tmp_path, "replicas=2") as found:
        pids = [r["pid"] for r in announced(found)["replicas"]]
        found.kill()
        found.wait()
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.parametrize("keeps_devices", [True, False])
def test_a_replica_that_loads_is_waited_for_where_a_kill_spoils_devices(
    tmp_path: Path, keeps_devices: bool
) -> None:
    load = partial(make, load=2.0, closes=tmp_path / "closed")
    setup = ReplicaSetup(load=load, keeps_devices=keeps_devices)
    pool = Replicas(1, setup, EmbeddedEngine(preload=[replica.__name__]))
    pool.start()
    until(lambda: any(link.attached for link in pool._by_handle.values()))
    started = time.monotonic()
    pool.close(0.5)
    assert (tmp_path / "closed").exists() == keeps_devices
    assert (time.monotonic() - started > 1.0) == keeps_devices
