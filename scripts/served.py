"""A port behind `serve-local` for scripts that put load on it, their result files, and what they hold flat."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from gemma_neuron.elastic.memory import tree_bytes

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "gemma_neuron" / "data" / "demo-model"
STOP_SECONDS = 120.0
GROWTH = 1.05
SLACK = {
    "controller_bytes": 32 * 2**20,
    "tree_bytes": 96 * 2**20,
    "descriptors": 8,
    "threads": 4,
}
"""What is held flat, and how far it may go up beside `GROWTH`: allocators keep what they have had."""


def bundled(out: Path, *flags: str) -> Path:
    """A port of the bundled model, made where it is not there yet. Raises CalledProcessError."""
    command = [sys.executable, "-m", "gemma_neuron", "compile", str(MODEL), "--out", str(out)]
    command += ["--backend", "cpu", *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out


@dataclass
class Server:
    """A running `serve-local`."""

    url: str
    process: subprocess.Popen[str]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def ready(self) -> list[dict[str, int]]:
        """{index, pid} of the replicas that serve."""
        found: list[dict[str, int]] = self.readiness()["replicas"]
        return found

    def readiness(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx2.get(f"{self.url}/health/ready", timeout=30.0).json()
        return found

    def wait_ready(self, count: int, seconds: float) -> float:
        """Seconds until so many replicas serve. Raises TimeoutError."""
        started = time.monotonic()
        while len(self.ready()) < count:
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"not {count} replicas ready within {seconds:g} s")
            time.sleep(0.02)
        return time.monotonic() - started

    def sample(self) -> dict[str, int]:
        """What is to stay flat."""
        controller = psutil.Process(self.process.pid)
        return {
            "controller_bytes": controller.memory_info().rss,
            "tree_bytes": tree_bytes(self.process.pid),
            "descriptors": controller.num_fds(),
            "threads": controller.num_threads(),
        }

    def kill(self, seconds: float) -> str:
        """SIGKILL to the controller: "ok" and how long, or what outlived it by `seconds` (which is killed too)."""
        controller = psutil.Process(self.process.pid)
        started = controller.children(recursive=True)
        killed = time.monotonic()
        controller.kill()
        _, alive = psutil.wait_procs(started, timeout=seconds)
        took = time.monotonic() - killed
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        if alive:
            return f"{len(alive)} of {len(started)} processes outlived it by {seconds:g} s"
        return f"ok, {took:.2f} s"


@contextmanager
def served(port: Path, *flags: str) -> Iterator[Server]:
    """`serve-local` on a free TCP port, whatever the port's verdict; ended by TERM, unless it has ended.

    Raises SystemExit when it does not start; what it says goes to this process's stderr.
    """
    command = [sys.executable, "-m", "gemma_neuron", "serve-local", str(port), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--unvalidated", *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"serve-local {port} did not start (exit {process.wait()})")
        yield Server(json.loads(line)["url"], process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


@dataclass
class Told:
    """One choice as a client has it. `gap`: the longest silence in it, seconds and when it ended."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    gap: tuple[float, float] = (0.0, 0.0)

    @property
    def answer(self) -> tuple[list[str], list[float | None], str, str | None]:
        return self.tokens, self.logprobs, self.text, self.finish


class NotReady(Exception):
    """The server said 503: it serves nothing now, and asks to be tried again."""


def whole_completion(client: httpx2.Client, url: str, body: Mapping[str, Any]) -> list[Told]:
    """The choices of one completion. Raises NotReady, or AssertionError."""
    reply = client.post(f"{url}/v1/completions", json=body)
    _good(reply.status_code, reply.read)
    told = [Told() for _ in range(body.get("n", 1))]
    _take(told, reply.json())
    return told


def stream_completion(client: httpx2.Client, url: str, body: Mapping[str, Any]) -> list[Told]:
    """The choices of one completion, streamed to its end. Raises NotReady, or AssertionError where it breaks."""
    told, last, done = [Told() for _ in range(body.get("n", 1))], 0.0, False
    with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
        _good(reply.status_code, reply.read)
        for line in reply.iter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                now = time.monotonic()
                for one in told:
                    one.gap = max(one.gap, (now - last if last else 0.0, now))
                last = now
                _take(told, json.loads(line[6:]))
    assert done, f"a stream without its end: {told}"
    return told


def _good(status: int, said: Callable[[], bytes]) -> None:
    if status == 503:
        raise NotReady
    assert status == 200, f"status {status}: {said()[:200]!r}"


def _take(told: Sequence[Told], chunk: Any) -> None:
    assert "error" not in chunk, chunk["error"]
    for choice in chunk["choices"]:
        one = told[choice["index"]]
        one.text += choice["text"]
        one.finish = choice["finish_reason"] or one.finish
        if choice["logprobs"] is not None:
            one.tokens += choice["logprobs"]["tokens"]
            one.logprobs += choice["logprobs"]["token_logprobs"]


def flatness(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians of the second and the last quarter of what `SLACK` names, and whether each stayed flat."""
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    found = {}
    for name, slack in SLACK.items():
        before, after = (statistics.median(s[name] for s in part) for part in (early, late))
        flat = after <= max(before * GROWTH, before + slack)
        found[name] = {"before": before, "after": after, "flat": flat}
    return found
