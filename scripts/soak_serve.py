"""A server of a port under mixed load, with its memory and descriptors over time as JSON lines.

Clients draw what they do: chats whole and streamed, seeded ones that must repeat to the letter, n answers, logprobs, a
schema, stop strings, requests that must be refused, streams that are left in the middle, connections that are half
open, bytes that are no request. With --kill-every a replica is killed, each third time stopped. At the end: no answer
was wrong, missing or another on repetition; of the moments at which all replicas served, the last quarter has the
memory (the controller's, and that of all processes), the descriptors and the threads of the second; faults were put
all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402

from scripts.result_file import add_result  # noqa: E402
from scripts.served import Server, flatness, served  # noqa: E402

SAMPLE_SECONDS = 5.0
FAULTS_PUT = 0.8
"""Of those that the time is for; none is put while no replica serves."""
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
WORDS = "what is the capital of France and why do ships need a light on the coast at night".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kill-every", type=float, help="seconds between faults")
    parser.add_argument("--results", type=Path, default=Path("soak-serve-results.jsonl"))
    asked = parser.parse_args()
    with served(asked.port, "--replicas", str(asked.replicas)) as server:
        soak = Soak(server, asked.replicas)
        total = soak.run(asked.minutes * 60, asked.clients, asked.kill_every, asked.results)
    total["exit_code"] = server.process.returncode
    print(json.dumps({"total": total}))
    return 0 if total["good"] and total["exit_code"] == 0 else 1


class Soak:
    """Clients, faults and samples until the time is over."""

    def __init__(self, server: Server, replicas: int) -> None:
        self._server, self._replicas = server, replicas
        self.url, self.address = server.url, server.address
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.faults = 0
        (model,) = httpx2.get(f"{self.url}/v1/models").json()["data"]
        self.most_words = max(1, min(12, (model["max_model_len"] - 40) // 6))
        """Of a question: some six tokens each in a small vocabulary, and the template's own."""

    def run(
        self, seconds: float, clients: int, kill_every: float | None, results: Path
    ) -> dict[str, Any]:
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]
        if kill_every is not None:
            threads.append(threading.Thread(target=self._break, args=(kill_every,)))
        for thread in threads:
            thread.start()
        samples, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(SAMPLE_SECONDS, max(end - time.monotonic(), 0.1)))
            samples.append(self._sample())
            add_result(results, samples[-1])
        self.stop.set()
        for thread in threads:
            thread.join()
        wanted = int(seconds / kill_every * FAULTS_PUT) if kill_every else 0
        return self._verdict(samples, seconds, wanted)

    def _sample(self) -> dict[str, Any]:
        return {
            "time": round(time.time(), 1),
            "ready": len(self._server.ready()),
            **self._server.sample(),
            "requests": sum(self.counts.values()),
            "faults": self.faults,
            "wrong": len(self.wrong),
        }

    def _verdict(
        self, samples: list[dict[str, Any]], seconds: float, wanted: int
    ) -> dict[str, Any]:
        whole = [sample for sample in samples if sample["ready"] == self._replicas]
        flat = flatness(whole) if whole else {}
        enough = bool(whole) and self.faults >= wanted
        return {
            "good": not self.wrong and enough and all(found["flat"] for found in flat.values()),
            "seconds": seconds,
            "requests": dict(self.counts),
            "faults": self.faults,
            "faults_wanted": wanted,
            "wrong": len(self.wrong),
            "first_wrong": self.wrong[:5],
            "samples_at_full_strength": len(whole),
            "flat": flat,
        }

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        kinds: list[Callable[[httpx2.Client, random.Random], None]] = [
            self.whole, self.streamed, self.repeated, self.held, self.refused, self.leaving,
            self.hostile,
        ]  # fmt: skip
        with httpx2.Client(timeout=300.0) as client:
            while not self.stop.is_set():
                kind = rng.choice(kinds)
                try:
                    kind(client, rng)
                    self.counts[kind.__name__] += 1
                except Exception as error:
                    self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])

    def _break(self, every: float) -> None:
        rng = random.Random(0)
        while not self.stop.wait(every):
            try:
                self._fault(rng)
            except Exception as error:  # the next fault is put all the same
                self.wrong.append(f"fault: {type(error).__name__}: {error}"[:300])

    def _fault(self, rng: random.Random) -> None:
        ready = self._server.ready()
        number = signal.SIGSTOP if self.faults % 3 == 2 else signal.SIGKILL
        if ready:
            with suppress(ProcessLookupError):  # it has gone by itself since
                os.kill(rng.choice(ready)["pid"], number)
                self.faults += 1

    # --- what clients do -----------------------------------------------------------------------------

    def ask(self, client: httpx2.Client, **body: Any) -> Any:
        """A chat's answer; waits while no replica serves, as a client behind a balancer would."""
        while True:
            reply = client.post(f"{self.url}/v1/chat/completions", json={"max_tokens": 24, **body})
            if reply.status_code != 503:
                assert reply.status_code == 200, f"status {reply.status_code}: {reply.text[:200]}"
                return reply.json()
            self.counts["not ready"] += 1
            time.sleep(0.2)

    def whole(self, client: httpx2.Client, rng: random.Random) -> None:
        found = self.ask(
            client, messages=self.question(rng), n=rng.choice([1, 1, 2]), logprobs=True
        )
        assert found["usage"]["completion_tokens"] > 0

    def repeated(self, client: httpx2.Client, rng: random.Random) -> None:
        """The same seed gives the same text, whatever else goes on; streamed too."""
        body = {"messages": self.question(rng), "temperature": 1.0, "seed": rng.randrange(2**31)}
        first = self.ask(client, **body)["choices"][0]["message"]["content"]
        again = self.ask(client, **body)["choices"][0]["message"]["content"]
        assert first == again, f"{first!r} is not {again!r}"
        text = self._stream(client, body)
        assert text in (None, first), f"streamed {text!r} is not {first!r}"

    def streamed(self, client: httpx2.Client, rng: random.Random) -> None:
        self._stream(client, {"messages": self.question(rng), "stop": ["zzz", "qqq"]})

    def _stream(self, client: httpx2.Client, body: dict[str, Any]) -> str | None:
        """A streamed answer's text, which must end as a whole one; None where the server was not ready."""
        text, ended = "", False
        body = {"max_tokens": 24, **body, "stream": True}
        url = f"{self.url}/v1/chat/completions"
        with client.stream("POST", url, json=body) as reply:
            if reply.status_code == 503:
                return None
            assert reply.status_code == 200, f"status {reply.status_code}: {reply.read()[:200]!r}"
            for line in reply.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk["error"]
                    text += chunk["choices"][0]["delta"].get("content") or ""
        assert ended, "a stream without its end"
        return text

    def held(self, client: httpx2.Client, rng: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        found = self.ask(client, messages=self.question(rng), response_format=form, max_tokens=60)
        choice = found["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"])["ok"], bool)

    def refused(self, client: httpx2.Client, rng: random.Random) -> None:
        body = rng.choice([b"{", b"\xff\xfe", b'{"messages": []}', b'{"mirostat": 1}', b"[" * 9999])
        reply = client.post(
            f"{self.url}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert reply.status_code == 400, f"status {reply.status_code}"

    def leaving(self, client: httpx2.Client, rng: random.Random) -> None:
        body = {"messages": self.question(rng), "stream": True, "max_tokens": 100}
        url = f"{self.url}/v1/chat/completions"
        with client.stream("POST", url, json=body) as reply:
            for i, _ in enumerate(reply.iter_lines()):
                if i > rng.randrange(20):
                    return

    def question(self, rng: random.Random) -> list[dict[str, str]]:
        words = rng.choices(WORDS, k=rng.randrange(1, self.most_words + 1))
        return [{"role": "user", "content": " ".join(words)}]

    def hostile(self, client: httpx2.Client, rng: random.Random) -> None:
        """Connections that send nothing, half a head, or noise; closed by us after a while."""
        opened = [socket.create_connection(self.address, timeout=10) for _ in range(10)]
        for one in opened:
            one.sendall(rng.choice([b"", b"POST /v1/chat", b"\x16\x03\x01\x02\x00", b"\r\n" * 50]))
        time.sleep(rng.random())
        for one in opened:
            one.close()


if __name__ == "__main__":
    sys.exit(main())
