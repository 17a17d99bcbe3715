"""Notices from a real server on loopback, and signals to real processes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import DISABLED, ENDPOINT, InstanceMetadata
from gemma_neuron.elastic.notice import FLUSH_SECONDS, TRIES, Notices
from gemma_neuron.errors import Cancelled, Interrupted, SettingsError
from tests.elastic.imds_stand_in import ACTION, Metadata

POLL = 0.03


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


class Watched:
    """Notices of an endpoint, with the events they led to."""

    def __init__(self, url: str) -> None:
        self.said: list[dict[str, Any]] = []
        events = EventLog(lambda what, facts: self.said.append({"event": what} | facts))
        source = InstanceMetadata.here({ENDPOINT: url})
        self.notices = Notices(events, source, poll_seconds=POLL)

    def until(self, holds: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end
            self.notices.ending()
            time.sleep(0.01)
        self.notices.ending()


def test_no_notice_is_asked_for_with_a_token_only(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: len(metadata.asked) > 6)
    assert metadata.asked[0] == "PUT /latest/api/token"
    assert metadata.asked.count("PUT /latest/api/token") == 1
    assert watched.notices.outlook == "clear" and not watched.said


def test_a_proxy_is_not_asked(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    metadata.take_away(120)
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: watched.notices.outlook == "notice")


def test_a_spot_notice_ends_the_run_in_time(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: len(metadata.asked) > 3)
        metadata.take_away(120)
        watched.until(lambda: watched.notices.outlook == "notice")
        ending = watched.notices.ending()
    assert ending is not None
    error, until = ending
    assert isinstance(error, PreemptionNotice) and error.exit_code == 75
    assert until - time.monotonic() == pytest.approx(120 - FLUSH_SECONDS, abs=3)
    (event,) = watched.said
    assert (event["event"], event["outlook"]) == ("notice", "notice")
    assert "EC2 will terminate this instance" in event["why"]


@pytest.mark.parametrize("text", ["", "{}", "null", '{"action": "stop", "time": 5}', "<html>"])
def test_a_notice_that_cannot_be_read_is_one_all_the_same(metadata: Metadata, text: str) -> None:
    metadata.texts[ACTION] = text
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: watched.notices.ending() is not None)


def test_an_endpoint_that_fails_after_it_answered_is_not_read_as_no_notice(
    metadata: Metadata,
) -> None:
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: len(metadata.asked) > 3)
        metadata.failing = True
        watched.until(lambda: watched.notices.outlook == "unknown")
        assert watched.notices.cautious and watched.notices.ending() is None
        metadata.failing = False
        metadata.recommend()
        watched.until(lambda: watched.notices.outlook == "rebalance")
        metadata.texts.clear()
        watched.until(lambda: not watched.notices.cautious)
    assert [event["outlook"] for event in watched.said] == ["unknown", "rebalance", "clear"]


def test_a_token_that_ran_out_is_renewed(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    with watched.notices:
        watched.until(lambda: len(metadata.asked) > 3)
        metadata.token = "token-2"
        metadata.recommend()
        watched.until(lambda: watched.notices.outlook == "rebalance")
    assert metadata.asked.count("PUT /latest/api/token") == 2


def test_a_machine_without_metadata_is_left_alone_after_some_tries() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(5)
        watched = Watched(f"http://127.0.0.1:{server.getsockname()[1]}")
        with watched.notices:
            for _ in range(TRIES):
                server.accept()[0].close()
            server.settimeout(10 * POLL)
            with pytest.raises(TimeoutError):
                server.accept()
    assert watched.notices.outlook == "clear" and not watched.said


def test_the_endpoint_is_botocores() -> None:
    assert InstanceMetadata.here({DISABLED: "TRUE"}) is None
    assert InstanceMetadata.here({}) is not None
    with pytest.raises(SettingsError, match=ENDPOINT):
        InstanceMetadata.here({ENDPOINT: "169.254.169.254"})


def test_signals_are_noted_and_a_second_ctrl_c_is_at_once() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Notices(EventLog()) as notices:
        signal.raise_signal(signal.SIGTERM)
        ending = notices.ending()
        assert ending is not None and type(ending[0]) is Interrupted
        assert ending[1] <= time.monotonic()
        signal.raise_signal(signal.SIGINT)
        ending = notices.ending()
        assert ending is not None and isinstance(ending[0], Cancelled)
        assert ending[0].exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
