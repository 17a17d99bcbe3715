"""A compile that is asked to end while it compiles: the command itself, real signals, a real metadata server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from gemma_neuron.elastic.metadata import ENDPOINT
from gemma_neuron.port import Port
from tests.elastic.imds_stand_in import Metadata

NOWHERE = "http://127.0.0.1:9"
ROOT = Path(__file__).parents[2]
FLAGS = (
    "--backend cpu --tp 2 --dtype float32 --max-context 48 --slots 3 --buckets 24 --json".split()
)
AT_ONCE_SECONDS = 15
STARTS_SECONDS, ENDS_SECONDS = 300, 60
"""The end includes what an interpreter with a model's geometry in it takes to clear its heap."""


def start(source: Path, out: Path, endpoint: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gemma_neuron", "compile", str(source), "--out", str(out)]
    return subprocess.Popen(
        [*command, *FLAGS],
        env={**os.environ, ENDPOINT: endpoint},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def workers(port: Path) -> list[int]:
    """Pids of the workers that were started; waits for the first."""
    end = time.monotonic() + STARTS_SECONDS
    while time.monotonic() < end:
        found = [e["worker_pid"] for e in Port(port).events() if e["event"] == "worker_started"]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def ended(process: subprocess.Popen[str], port: Path) -> tuple[int, str]:
    """Exit code and standard output of a command that was asked to end; no worker of it is left."""
    pids = workers(port)
    out, _ = process.communicate(timeout=ENDS_SECONDS)
    gone = [pid for pid in pids if not psutil.pid_exists(pid)]
    assert gone == pids
    return process.returncode, out


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


def test_signals_and_a_spot_notice(source: Path, tmp_path: Path, metadata: Metadata) -> None:
    names = ("term", "twice", "notice")
    with ExitStack() as stack:
        running = {}
        for name in names:
            url = metadata.url if name == "notice" else NOWHERE
            running[name] = stack.enter_context(start(source, tmp_path / name, url))
            stack.callback(running[name].kill)
        for name in names:
            workers(tmp_path / name)
        running["term"].send_signal(signal.SIGTERM)
        for _ in range(2):
            running["twice"].send_signal(signal.SIGINT)
            time.sleep(0.02)
        asked = time.monotonic()
        metadata.take_away(15)
        # The second may come when the first has been answered already; a shell shows 130 for both.
        assert ended(running["twice"], tmp_path / "twice")[0] in (130, -signal.SIGINT)
        assert time.monotonic() - asked < AT_ONCE_SECONDS
        assert ended(running["term"], tmp_path / "term")[0] == 75
        code, out = ended(running["notice"], tmp_path / "notice")
    error = json.loads(out)["error"]
    assert code == 75 and "EC2 will terminate this instance" in error["message"]
    assert "Run the same command" in error["hint"]
    (event,) = [e for e in Port(tmp_path / "notice").events() if e["event"] == "notice"]
    assert event["outlook"] == "notice"
