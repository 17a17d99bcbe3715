"""Whether a request's answer depends on the request alone, on a real port.

Requests are turns of conversations, so that their beginnings can be reused, half of them greedy and half seeded. Each
is run alone without reuse; in a full batch; in a full batch with reuse; on replicas while one is killed; and by
`serve-local` over HTTP, whole and streamed, where the texts are compared. One JSON line a group of requests; started
again, the script goes on until `--count` requests are done over all its starts.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gemma_neuron.chat import load_chat_assets  # noqa: E402
from gemma_neuron.elastic.embedded import EmbeddedEngine  # noqa: E402
from gemma_neuron.pipeline import open_port, replica_loader  # noqa: E402
from gemma_neuron.serving.answers import Answer, Reading  # noqa: E402
from gemma_neuron.serving.engine import Engine  # noqa: E402
from gemma_neuron.serving.replica import ReplicaSetup  # noqa: E402
from gemma_neuron.serving.replicas import Replicas  # noqa: E402
from gemma_neuron.serving.requests import GenerationRequest, Sampling, TokenEvent  # noqa: E402
from gemma_neuron.serving.source import TokenSource  # noqa: E402

GROUP = 25
SECONDS = 600.0


@dataclass(frozen=True)
class Case:
    """A request to the engine, and the same one as a body of /v1/completions."""

    request: GenerationRequest
    body: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=Path)
    parser.add_argument("--count", type=int, default=500, help="requests over all runs")
    parser.add_argument("--minutes", type=float, help="stop beginning groups after so many")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("equality-serve-results.jsonl"))
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    port = open_port(asked.port)
    name = f"{port.record.digest[:12]}"
    done = {line["group"] for line in read(asked.results) if line["port"] == name}
    groups = range((asked.count + GROUP - 1) // GROUP)
    if missing := [group for group in groups if group not in done]:
        with Bench(asked.port, asked.replicas) as bench:
            for group in missing:
                if time.monotonic() > end:
                    break
                line = {"port": name, "group": group, **bench.compare(group)}
                with asked.results.open("a") as results:
                    results.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    lines = [line for line in read(asked.results) if line["port"] == name]
    differing = sum(len(line["differing"]) for line in lines)
    total = {
        "requests": sum(line["requests"] for line in lines),
        "tokens": sum(line["tokens"] for line in lines),
        "comparisons": sum(line["comparisons"] for line in lines),
        "kills": sum(line["kills"] for line in lines),
        "reused_prompt_tokens": sum(line["reused"] for line in lines),
        "differing": differing,
    }
    print(json.dumps({"total": total}))
    return 1 if differing or total["requests"] < asked.count else 0


def read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


class Bench:
    """An engine with reuse and one without, replicas, and a server, all on one port."""

    def __init__(self, path: Path, count: int) -> None:
        port = open_port(path)
        self._load, preload = replica_loader(port)
        self.assets = load_chat_assets(port.source_folder)
        assert port.spec is not None
        self.context, self.vocab = port.spec.max_context, port.geometry.vocab
        self._plain = Engine(lambda: self._load(0), reuse_prefixes=False)
        self._reusing = Engine(lambda: self._load(0))
        setup = ReplicaSetup(load=self._load)
        self._pool = Replicas(count, setup, EmbeddedEngine(preload=list(preload)))
        command = [sys.executable, "-m", "gemma_neuron", "serve-local", str(path), "--port", "0"]
        self._server = subprocess.Popen(
            [*command, "--unvalidated"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def __enter__(self) -> Bench:
        for source in (self._plain, self._reusing, self._pool):
            source.start()
        assert self._server.stdout is not None
        self._url = json.loads(self._server.stdout.readline())["url"]
        for source in (self._plain, self._reusing):
            if not source.wait_loaded(SECONDS):
                raise SystemExit(f"not loaded: {source.failure}")
        self._all_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.send_signal(signal.SIGTERM)
        self._server.wait(60)
        for source in (self._plain, self._reusing, self._pool):
            source.close(10.0)

    def compare(self, group: int) -> dict[str, Any]:
        cases = self.cases(random.Random(group))
        requests = [case.request for case in cases]
        started = time.monotonic()
        alone = [run(self._plain, [request])[0] for request in requests]
        before = self._reusing.states()[0].load.prefix_tokens
        found = {"batch": run(self._plain, requests)}
        # Turn by turn, as a chat comes; the last pass finds every beginning read.
        found["reused"] = [run(self._reusing, [request])[0] for request in requests]
        found["reused batch"] = run(self._reusing, requests)
        reused = self._reusing.states()[0].load.prefix_tokens - before
        found["killed"] = self._under_kills(requests, random.Random(-group))
        differing = [
            {"request": i, "how": how}
            for how, answers in found.items()
            for i, tokens in enumerate(answers)
            if tokens != alone[i]
        ]
        texts = [self.text(case, tokens) for case, tokens in zip(cases, alone, strict=True)]
        for i, (case, text) in enumerate(zip(cases, texts, strict=True)):
            for how in (False, True):
                if served(self._url, {**case.body, "stream": how}) != text:
                    differing.append({"request": i, "how": f"served, stream {how}"})
        return {
            "requests": len(cases),
            "tokens": sum(map(len, alone)),
            "comparisons": len(cases) * (len(found) + 2),
            "kills": 1,
            "reused": reused,
            "differing": differing,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _under_kills(
        self, requests: Sequence[GenerationRequest], rng: random.Random
    ) -> list[list[int]]:
        self._all_ready()

        def kill() -> None:
            time.sleep(rng.uniform(0.05, 1.0))
            state = rng.choice(self._pool.states())
            if state.pid:
                os.kill(state.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        found = run(self._pool, requests)
        killer.join()
        return found

    def _all_ready(self) -> None:
        while any(state.phase != "ready" for state in self._pool.states()):
            if self._pool.failure is not None:
                raise SystemExit(f"replicas failed: {self._pool.failure}")
            time.sleep(0.02)

    def cases(self, rng: random.Random) -> list[Case]:
        """Turns of five conversations."""
        out: list[Case] = []
        while len(out) < GROUP:
            history = [self.assets.tokenizer.bos_id]
            for _ in range(GROUP // 5):
                new = rng.randrange(2, self.context // 4)
                history += [rng.randrange(110, self.vocab) for _ in range(new)]
                history = history[: self.context * 7 // 8]
                out.append(self._case(rng, list(history)))
        return out

    def _case(self, rng: random.Random, ids: list[int]) -> Case:
        greedy = rng.random() < 0.5
        values: dict[str, Any] = {"temperature": 0.0 if greedy else rng.choice([0.7, 1.0, 1.5])}
        if not greedy:
            values |= {"top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 40])}
        values["frequency_penalty"] = rng.choice([0.0, 0.5])
        seed, length = rng.randrange(2**31), rng.randrange(2, 50)
        request = GenerationRequest(
            prompt_ids=tuple(ids),
            max_tokens=length,
            stop_ids=self.assets.stop_ids,
            sampling=Sampling(seed=seed, **values),
        )
        body = {"model": "any", "prompt": ids, "max_tokens": length, "seed": seed, **values}
        return Case(request, body)

    def text(self, case: Case, tokens: Sequence[int]) -> str:
        """What the tokens say."""
        answer = Answer(self.assets, (), Reading())
        for i, token in enumerate(tokens):
            stopped = token in case.request.stop_ids
            last = i == len(tokens) - 1
            finish: Any = ("stop" if stopped else "length") if last else None
            answer.feed(TokenEvent(tag=0, token=token, finish=finish))
        return answer.text


def run(source: TokenSource, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """The tokens of each, all in the source at once."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    tokens: list[list[int]] = [[] for _ in requests]
    for i, request in enumerate(requests):
        source.submit(replace(request, tag=i), events.put)
    running = len(requests)
    while running:
        event = events.get(timeout=SECONDS)
        if event.token is not None:
            tokens[event.tag].append(event.token)
        if event.finish is not None:
            running -= 1
            if event.finish not in ("stop", "length"):
                raise SystemExit(f"a request ended with {event.finish}: {event.error}")
    return tokens


def served(url: str, body: dict[str, Any]) -> str:
    import httpx2

    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as reply:
        if not body["stream"]:
            return str(json.loads(reply.read())["choices"][0]["text"])
        text = ""
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        return text


if __name__ == "__main__":
    sys.exit(main())
