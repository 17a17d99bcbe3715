"""`bench` against a server whose pace is known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gemma_neuron.errors import EnvironmentProblem, UsageError
from gemma_neuron.render.bench import require_plot
from gemma_neuron.serving.bench import Load, _ask, find_target, percentiles, run_load
from tests.cli_process import run_main
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import running

STEP = 0.01


def test_closed_and_open_loop_measure_the_pace(folder: Path) -> None:
    runner = FakeRunner(slots=4, step_seconds=STEP, script=[400], max_context=2000)
    with running(folder, runner) as server:
        target = find_target(server.url, None, None)
        assert (target.model, target.ignore_eos) == ("tiny", True)
        common = {"requests": 8, "input_words": 3, "output_tokens": 20}
        one = run_load(target, Load(concurrency=1, **common))
        four = run_load(target, Load(concurrency=4, **common))
        opened = run_load(target, Load(rate=1000.0, **common))
    for found in (one, four, opened):
        assert (found["requests"], found["errors"], found["output_tokens"]) == (8, 0, 160)
        assert found["prompt_tokens"] > 8 * 3
        # A busy machine may hand a client two tokens at once: half the pace is asked for.
        assert found["tpot_ms"]["p50"] >= 500 * STEP
    assert four["tokens_per_second"] > 1.3 * one["tokens_per_second"]
    # Eight at once on four slots: the later ones wait for a whole answer.
    assert opened["ttft_ms"]["p90"] > 1000 * STEP * 8


def test_the_command_gives_json_and_a_plot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(folder, FakeRunner(script=[400])) as server:
        flags = ["--requests", "3", "--output-tokens", "4", "--input-words", "2"]
        plot = tmp_path / "out.svg"
        done = run_main(capsys, "bench", server.url, *flags, "--concurrency", "2", "--rate", "100", "--json",
                   "--plot", str(plot))  # fmt: skip
        assert done.code == 0, done.err
        document = json.loads(done.out)
        assert [(r["concurrency"], r["rate"]) for r in document["runs"]] == [(2, None), (None, 100)]
        assert all(r["errors"] == 0 for r in document["runs"])
        assert plot.read_text().startswith("<?xml")


def test_errors_are_counted_and_told(folder: Path) -> None:
    with running(folder, FakeRunner(max_context=20)) as server:
        target = find_target(server.url, None, None)
        with pytest.raises(EnvironmentProblem, match="400"):
            run_load(target, Load(requests=2, concurrency=1))
    with pytest.raises(EnvironmentProblem, match="does not answer"):
        find_target(server.url, None, None)
    with pytest.raises(UsageError, match="no http"):
        find_target("ftp://x", None, None)
    with pytest.raises(UsageError, match=r"\.png"):
        require_plot(Path("x.gif"))


class Peer(BaseHTTPRequestHandler):
    """Another server: it refuses ignore_eos, counts tokens in every event, and ends some answers with no answer.
    `closes`: how many requests it takes and closes the connection on."""

    closes = 0

    def do_GET(self) -> None:
        self._say(200, "application/json", b'{"data": [{"id": "peer"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if Peer.closes:
            Peer.closes -= 1
            return
        if "ignore_eos" in body:
            self._say(400, "application/json", b'{"error": {"message": "no such key: ignore_eos"}}')
            return
        events: list[Any] = [
            {"choices": [{"text": "a"}], "usage": {"completion_tokens": n, "prompt_tokens": 9}}
            for n in (2, 4)
        ]
        if body["prompt"].startswith("3."):
            events = [{"choices": [None]}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._say(200, "text/event-stream", text.encode())

    def _say(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def peer() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Peer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_peers_are_asked_alike(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal answers are asked of every server; one that refuses is told of, and what it says is counted right."""
    assert find_target(peer, None, True).ignore_eos
    flags = ["--requests", "3", "--concurrency", "1", "--output-tokens", "4", "--json"]
    done = run_main(capsys, "bench", peer, *flags)
    assert done.code == 0, done.err
    assert "refuses ignore_eos" in done.err
    document = json.loads(done.out)
    assert document["ignore_eos"] is False
    (run,) = document["runs"]
    assert (run["requests"], run["errors"], run["output_tokens_a_request"]) == (3, 1, 4)
    assert "AttributeError" in run["error"]
    assert run_main(capsys, "bench", peer, *flags, "--ignore-eos").code != 0


@pytest.mark.parametrize("closes", [1, 2])
def test_a_connection_closed_under_a_request_is_one_more_try(peer: str, closes: int) -> None:
    """As a server does that gives up a kept connection just when the next request comes; twice is a fault."""
    target = find_target(peer, None, False)
    with httpx2.Client() as client:
        Peer.closes = closes
        found = _ask(client, target, "a", 3)
    assert Peer.closes == 0
    assert (found.error != "") == (closes == 2), found.error


def test_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([0.5])["p99"] == 500
    assert percentiles([i / 1000 for i in range(101)]) == {"p50": 50, "p90": 90, "p99": 99}
