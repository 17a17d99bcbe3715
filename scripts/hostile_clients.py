"""A server under hostile clients: what they cost it, and what they cost others.

For each kind: well-behaved clients chat on a quiet server, then beside the attack, which runs in a process of its own.
Held: every one of their answers comes and is the right one; their p99 stays under twice the quiet one measured just
before; the memory that controller and replicas take at their worst is less than 200 MB above what they had before the
first attack; none of them was replaced; the attackers' connections are gone soon after them; and nothing was answered
with a 500. A check a kind, in `scripts.checks`' result file; started again, those that passed on this port are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402
import psutil  # noqa: E402

from gemma_neuron.elastic.memory import resident_bytes, tree  # noqa: E402
from gemma_neuron.pipeline import open_port  # noqa: E402
from scripts.checks import Check, Failed, alone, run_rest  # noqa: E402
from scripts.hostile_attacks import Address, Attack, allow_files, attacks  # noqa: E402
from scripts.served import Server, bundled, served  # noqa: E402

GROWTH_BYTES = 200 * 10**6
TIMES_QUIET = 2.0
CLIENTS = 2
TOKENS = 48
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SETTLE_SECONDS = 2.0
"""For an attack to be under way."""
CLOSED_SECONDS = 30.0
FILES_LEFT = 16
LOAD_SECONDS = 120.0
SHAPE = ("--tp", "2", "--max-context", "256", "--slots", "4", "--buckets", "32,64")


def main() -> int:
    known = attacks(10_000)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=Path, nargs="?", help="default: the bundled model's, made")
    parser.add_argument("--count", type=int, default=200, help="well-behaved requests a kind")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--only", action="append", default=[], choices=known)
    parser.add_argument("--results", type=Path, default=Path("hostile-clients-results.jsonl"))
    parser.add_argument("--work", type=Path, default=Path("hostile-clients-port"))
    asked = parser.parse_args()
    allow_files(asked.connections)
    with alone(asked.results, "--results"):
        path = asked.port or bundled(asked.work, *SHAPE)
        digest = open_port(path).record.digest[:12]
        facts = {"port": digest, "count": asked.count, "connections": asked.connections}
        with served(path) as server:
            server.wait_ready(1, LOAD_SECONDS)
            trial = Trial(server, asked.count)
            kinds = attacks(asked.connections)
            names = asked.only or list(kinds)
            checks: list[Check] = [
                (name, lambda kind=kinds[name]: trial.check(kind))  # type: ignore[misc]
                for name in names
            ]
            failed = run_rest(checks, asked.results, facts)
    print(json.dumps({"total": {"kinds": len(names), "failed": failed, **facts}}))
    return 1 if failed or server.process.returncode != 0 else 0


class Trial:
    """One server, and what it was before anybody attacked it."""

    def __init__(self, server: Server, count: int) -> None:
        self._server, self._count = server, count
        with httpx2.Client(timeout=60.0) as client:
            self._said = self._chat(client)
        self._well_behaved()  # all that a server allocates once
        self._replicas, self._bytes = server.ready(), sum(map(resident_bytes, self._pids()))
        self._files = server.sample()["descriptors"]

    def check(self, attack: Attack) -> str:
        """Put one attack; what it did. Raises Failed."""
        try:
            return self._check(attack)
        except (httpx2.HTTPError, psutil.Error) as error:
            raise Failed(f"no answer of the server: {type(error).__name__}: {error}") from error

    def _check(self, attack: Attack) -> str:
        quiet = self._well_behaved()
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here
        with attacked(attack, self._server.address):
            beside = self._well_behaved()
            files = self._server.sample()["descriptors"]
        growth = sum(map(peak_bytes, self._pids())) - self._bytes
        found: dict[str, Any] = {
            "p99_ms": round(1000 * p99(beside), 1),
            "quiet_p99_ms": round(1000 * p99(quiet), 1),
            "ratio": round(p99(beside) / p99(quiet), 2),
            "growth_mb": round(growth / 1e6, 1),
            "descriptors": files,
        }
        problems = []
        if found["ratio"] >= TIMES_QUIET:
            problems.append(f"p99 {found['ratio']} times the quiet one")
        if growth >= GROWTH_BYTES:
            problems.append(f"{found['growth_mb']} MB more")
        if self._server.ready() != self._replicas:
            problems.append(f"replicas {self._replicas} are now {self._server.ready()}")
        problems += self._left_open()
        if problems:
            raise Failed(f"{'; '.join(problems)} {json.dumps(found)}")
        return json.dumps(found)

    def _well_behaved(self) -> list[float]:
        """Seconds of each of `count` chats, `CLIENTS` at once. Raises Failed for one that is no answer."""

        def work(share: int) -> list[float]:
            found = []
            with httpx2.Client(timeout=60.0) as client:
                for _ in range(share):
                    started = time.monotonic()
                    said = self._chat(client)
                    found.append(time.monotonic() - started)
                    if said != self._said:
                        raise Failed(f"a well-behaved client got {said!r}, not {self._said!r}")
            return found

        shares = [max(self._count // CLIENTS, 1)] * CLIENTS
        with ThreadPoolExecutor(CLIENTS) as threads:
            try:
                return [seconds for part in threads.map(work, shares) for seconds in part]
            except (httpx2.HTTPError, KeyError, ValueError) as error:
                raise Failed(f"a well-behaved client: {type(error).__name__}: {error}") from error

    def _chat(self, client: httpx2.Client) -> str:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        reply = client.post(f"{self._server.url}/v1/chat/completions", json=body)
        if reply.status_code != 200:
            raise Failed(f"a well-behaved client got {reply.status_code}: {reply.text[:200]}")
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    def _pids(self) -> list[int]:
        return sorted(tree([self._server.process.pid]))

    def _left_open(self) -> list[str]:
        end = time.monotonic() + CLOSED_SECONDS
        while (files := self._server.sample()["descriptors"]) > self._files + FILES_LEFT:
            if time.monotonic() > end:
                return [f"{files} files open, {self._files} before"]
            time.sleep(0.1)
        return []


@contextmanager
def attacked(attack: Attack, address: Address) -> Iterator[None]:
    """The attack in a process of its own, under way. Raises Failed when it ended otherwise than it was told to."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    process = context.Process(target=attack, args=(address, stop))
    process.start()
    time.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        stop.set()
        process.join(60.0)
        code = process.exitcode
        process.kill()
    if code != 0:
        raise Failed(f"the attack ended with {code}; what it saw stands on stderr")


def peak_bytes(pid: int) -> int:
    """Most resident bytes since `clear_refs`; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    sys.exit(main())
