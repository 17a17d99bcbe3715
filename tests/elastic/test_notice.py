"""Notices from a real server on loopback, and signals to real processes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import DISABLED, ENDPOINT, InstanceMetadata
from gemma_neuron.elastic.notice import (
    ENDING_SECONDS,
    FLUSH_SECONDS,
    TRIES,
    UPLOAD_SECONDS,
    Notices,
)
from gemma_neuron.errors import Cancelled, Interrupted, SettingsError
from gemma_neuron.interrupts import AtOnce
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
        self.notices = Notices(source, poll_seconds=POLL)
        self.notices.events = events

    @contextmanager
    def noting(self) -> Iterator[None]:
        with self.notices.noting(), self.notices:
            yield

    def until(self, holds: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end
            self.notices.ending()
            time.sleep(0.01)
        self.notices.ending()


def test_no_notice_is_asked_for_with_a_token_only(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    with watched.noting():
        watched.until(lambda: len(metadata.asked) > 6)
    assert metadata.asked[0] == "PUT /latest/api/token"
    assert metadata.asked.count("PUT /latest/api/token") == 1
    assert watched.notices.outlook == "clear" and not watched.said


def test_a_proxy_is_not_asked(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    metadata.take_away(120)
    watched = Watched(metadata.url)
    with watched.noting():
        watched.until(lambda: watched.notices.outlook == "notice")


def test_a_spot_notice_ends_the_run_in_time(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    with watched.noting():
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
    with watched.noting():
        watched.until(lambda: watched.notices.ending() is not None)


def test_an_endpoint_that_fails_after_it_answered_is_not_read_as_no_notice(
    metadata: Metadata,
) -> None:
    watched = Watched(metadata.url)
    with watched.noting():
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
    with watched.noting():
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
        with watched.noting():
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


HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def test_signals_are_noted_and_a_second_ctrl_c_is_at_once() -> None:
    handlers = [signal.getsignal(number) for number in HEARD]
    with Notices() as notices, notices.noting():
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
            ending = notices.ending()
            assert ending is not None and type(ending[0]) is Interrupted
            assert number.name in ending[0].message and ending[1] <= time.monotonic()
        signal.raise_signal(signal.SIGINT)
        ending = notices.ending()
        assert ending is not None and isinstance(ending[0], Cancelled)
        assert ending[0].exit_code == 130
        with pytest.raises(AtOnce):
            signal.raise_signal(signal.SIGINT)
    assert handlers == [signal.getsignal(number) for number in HEARD]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_outside_of_ordered_work_a_signal_is_raised_where_the_process_stands(
    number: signal.Signals,
) -> None:
    """As what no library takes for an error of its own."""
    heard = []
    with pytest.raises(Interrupted, match=number.name), Notices():
        try:
            signal.raise_signal(number)
        except Exception as error:
            heard.append(error)
    assert not heard
    with pytest.raises(Interrupted, match=number.name), Notices():
        try:
            signal.raise_signal(number)
        finally:
            raise ValueError("what torch says of a storage's shape")
    with pytest.raises(AtOnce), Notices():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_what_whoever_started_us_ignores_stays_ignored() -> None:
    """nohup, and what a shell without job control starts in the background."""
    before = [signal.signal(number, signal.SIG_IGN) for number in HEARD]
    try:
        with Notices() as notices:
            for number in HEARD:
                signal.raise_signal(number)
            assert notices.ending() is None
    finally:
        for number, handler in zip(HEARD, before, strict=True):
            signal.signal(number, handler)


def test_a_notice_ends_a_system_call_that_waits(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    metadata.take_away(120)
    started = time.monotonic()
    with pytest.raises(PreemptionNotice), watched.notices, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.accept()
    assert time.monotonic() - started < 5
    assert [event["outlook"] for event in watched.said] == ["notice"]


def test_uploads_end_before_the_machine_does(metadata: Metadata) -> None:
    watched = Watched(metadata.url)
    assert watched.notices.upload_seconds() == UPLOAD_SECONDS
    metadata.take_away(70)
    with watched.noting():
        watched.until(lambda: watched.notices.outlook == "notice")
        assert watched.notices.upload_seconds() == pytest.approx(70 - ENDING_SECONDS, abs=3)
        signal.raise_signal(
            signal.SIGTERM
        )  # of the machine's own shutdown: there is no more time for that
        assert watched.notices.upload_seconds() < 70 - ENDING_SECONDS


def test_metadata_that_stays_silent_is_waited_for_as_long_as_a_notice_lasts(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never for ever: had a notice been given, the machine would be gone. It is said, and not taken for "clear"."""
    monkeypatch.setattr("gemma_neuron.elastic.notice.UNKNOWN_SECONDS", 0.5)
    watched = Watched(metadata.url)
    with watched.noting():
        watched.until(lambda: len(metadata.asked) > 3)
        metadata.failing = True
        watched.until(lambda: watched.notices.outlook == "unknown")
        assert watched.notices.cautious
        watched.until(lambda: not watched.notices.cautious)
        assert watched.notices.outlook == "unknown"
    assert [event["outlook"] for event in watched.said] == ["unknown", "unknown"]
    assert DISABLED in watched.said[-1]["why"]


def test_what_stands_already_is_known_before_anything_starts(metadata: Metadata) -> None:
    metadata.recommend()
    watched = Watched(metadata.url)
    with watched.notices, watched.notices.noting():
        assert watched.notices.cautious
