"""What scripts/kill-serve, soak-serve and hostile-clients hold a server to can fail."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scripts.equality_cases import Made, draw_case, says
from scripts.hostile_attacks import answer, huge
from scripts.kill_serve import Breaker, Load, totals
from scripts.served import SLACK, flatness, stream_completion, whole_completion
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import VOCAB, RunningServer, running

BODY = {"model": "any", "prompt": [2, 300, 301], "max_tokens": 6, "logprobs": 0}


@contextmanager
def cut(events: Sequence[Any]) -> Iterator[str]:
    """A server that streams these events to one client and closes."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            one, _ = listener.accept()
            with one:
                one.recv(65536)
                one.sendall((head + text).encode())
                one.shutdown(socket.SHUT_WR)
                while one.recv(65536):  # closed unread, it would be reset, the answer lost
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, "logprobs": None}]}


def test_streams_tell_what_whole_answers_tell(free: RunningServer) -> None:
    with httpx2.Client() as client:
        for body in (BODY, BODY | {"n": 2, "temperature": 1.0, "seed": 5, "echo": True}):
            whole = whole_completion(client, free.url, body)
            streamed = stream_completion(client, free.url, body)
            assert [one.answer for one in whole] == [one.answer for one in streamed]
            assert all(len(one.tokens) >= 6 and one.finish == "length" for one in whole)


@pytest.mark.parametrize(
    ("events", "why"), [([chunk("a")], "without its end"), ([{"error": "gone"}], "gone")]
)
def test_an_answer_without_its_end_is_none(events: Sequence[Any], why: str) -> None:
    with cut(events) as url, httpx2.Client() as client, pytest.raises(AssertionError, match=why):
        stream_completion(client, url, BODY)


def test_a_token_too_many_is_seen(folder: Path) -> None:
    with running(folder) as server:
        known: Any = server  # its URL alone is used
        load = Load(known, [BODY])
        with httpx2.Client() as client:
            load._one(client, 0)
            assert load.take()["wrong"] == []
            load._alone[0].tokens.append("x")
            load._one(client, 0)
        assert "is not" in load.take()["wrong"][0]


GOOD = {
    "what": "SIGKILL", "noticed_seconds": 0.1, "replaced_seconds": 1.0, "ready_seconds": 9.0,
    "longest_gap_seconds": 1.0, "unready": False, "wrong": [], "refused": 0, "answers": 3, "life": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"noticed_seconds": 0.6}, "noticed"),
        ({"replaced_seconds": None}, "replaced"),
        ({"longest_gap_seconds": 6.0}, "gap"),
        ({"unready": True}, "not ready with one left"),
        ({"what": "all"}, "ready with no replica"),
        ({"what": "SIGSTOP", "noticed_seconds": 10.9}, ""),
        ({"what": "SIGSTOP", "noticed_seconds": 11.1}, "noticed"),
        ({"wrong": ["request 3"]}, "request 3"),
    ],
)
def test_a_fault_that_is_made_good_late_is_told(change: dict[str, Any], why: str) -> None:
    nobody: Any = None
    found = Breaker(nobody, nobody, 2, 10.0)._outcome(GOOD | change)
    assert (why in found) if why else found == ""


def samples(of: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict.fromkeys(SLACK, 100) | of(i) for i in range(40)]


@pytest.mark.parametrize("name", SLACK)
def test_growth_is_seen_in_each_of_what_is_watched(name: str) -> None:
    assert all(found["flat"] for found in flatness(samples(lambda i: {})).values())
    grown = flatness(samples(lambda i: {name: 100 + i * SLACK[name]}))
    assert [key for key, found in grown.items() if not found["flat"]] == [name]


def test_totals_hold_every_fault_to_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    lines = samples(lambda i: GOOD | {"fault": i, "outcome": "ok"})
    end = {"life": 1, "controller": "ok, 0.01 s", "wrong": []}
    assert totals([*lines, end], 40) == 0
    assert totals([*lines, end], 41) == 1
    assert totals([*lines, end | {"controller": "3 of 4 outlived it"}], 40) == 1
    assert totals([*lines, end | {"wrong": ["x"]}], 40) == 1
    leaking = samples(lambda i: GOOD | {"fault": i, "outcome": "ok", "descriptors": 100 + i})
    assert totals([*leaking, end], 40) == 1
    assert "descriptors" in capsys.readouterr().out


def test_a_500_ends_an_attack() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 503 Service Unavailable\r\n")
        answer(ours, b"x")
        theirs.sendall(b"HTTP/1.1 500 Internal Server Error\r\n")
        with pytest.raises(AssertionError, match="500"):
            answer(ours, b"x")
    assert all(len(body) <= 4 * 2**20 for body in huge())


def test_drawn_requests_are_the_same_for_the_engine_and_over_http(folder: Path) -> None:
    import random

    from scripts.equality_serve import run

    with running(folder, FakeRunner(max_context=256)) as server, httpx2.Client() as client:
        rng, seen = random.Random(3), set[str]()
        for _ in range(40):
            case = draw_case(rng, server.assets, [2, *rng.choices(range(110, VOCAB), k=9)], VOCAB)
            made: list[Made] = run(server.engine, case.requests)
            told = whole_completion(client, server.url, case.body)
            for choice, one in enumerate(told):
                assert (one.text, one.finish) == says(server.assets, case, choice, made[choice])
            seen |= set(case.body)
        wanted = {"min_p", "logit_bias", "n", "stop", "response_format", "echo", "logprobs"}
        assert seen >= wanted | {"presence_penalty", "repetition_penalty"}
