"""Whether a request's answer depends on the request alone, on a real port.

Requests are turns of conversations, so that their beginnings can be reused, half of them greedy and half seeded, with
whatever parameters there are. Each is run alone without reuse, its chunks one after another; in a full batch, its
chunks between the others' steps; with reuse, alone and in a batch; on replicas killed while they answer; and by
`serve-local` over HTTP, whole and streamed. Tokens and log-probabilities are compared, over HTTP texts and finish
reasons too: all must be equal.

Beside that, and judged by nothing: how many answers have other tokens where the prompt is read in chunks of another
length. No port does that, its buckets decide, and other graphs round otherwise; the figure says how much.

One JSON line a group of requests; started again, the script goes on until `--count` requests are done over all starts.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402

from gemma_neuron.backends.base import Runner  # noqa: E402
from gemma_neuron.chat import load_chat_assets  # noqa: E402
from gemma_neuron.elastic.embedded import EmbeddedEngine  # noqa: E402
from gemma_neuron.pipeline import open_port, replica_loader  # noqa: E402
from gemma_neuron.serving.engine import Engine  # noqa: E402
from gemma_neuron.serving.links import Ticket  # noqa: E402
from gemma_neuron.serving.replica import LoadRunner, ReplicaSetup  # noqa: E402
from gemma_neuron.serving.replicas import Replicas  # noqa: E402
from gemma_neuron.serving.requests import GenerationRequest, TokenEvent, TokenLogprob  # noqa: E402
from gemma_neuron.serving.source import TokenSource  # noqa: E402
from gemma_neuron.tokenizer import TOKENIZER_FILE  # noqa: E402
from scripts.equality_cases import Case, Made, draw_cases, says  # noqa: E402
from scripts.result_file import add_result, read_results  # noqa: E402
from scripts.served import (  # noqa: E402
    Told,
    bundled,
    served,
    stream_completion,
    whole_completion,
)

SECONDS = 600.0
KILLS = 2
"""Of replicas, in each group."""
AT_ONCE = 6
DTYPES = ("float32", "bfloat16")
SHAPE = ("--tp", "1", "--max-context", "256", "--slots", "4", "--buckets", "32,64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ports", type=Path, nargs="*", help="default: the bundled model's, made")
    parser.add_argument("--count", type=int, default=500, help="requests a port, over all runs")
    parser.add_argument("--minutes", type=float, help="stop beginning groups after so many")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("equality-serve-results.jsonl"))
    parser.add_argument("--work", type=Path, default=Path("equality-serve-ports"))
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    ports = asked.ports or [
        bundled(asked.work / dtype, "--dtype", dtype, *SHAPE) for dtype in DTYPES
    ]
    good = [one_port(path, asked, end) for path in ports]
    return 0 if all(good) else 1


def one_port(path: Path, asked: argparse.Namespace, end: float) -> bool:
    """Compare what is missing, tell the totals; whether every request was compared and equal."""
    port = open_port(path)
    assert port.spec is not None
    name = f"{port.record.digest[:12]} {port.spec.dtype}"
    lines = [line for line in read_results(asked.results) if line["port"] == name]
    if requests(lines) < asked.count and time.monotonic() < end:
        with Bench(path, asked.replicas) as bench:
            while requests(lines) < asked.count and time.monotonic() < end:
                group = len(lines)
                lines.append({"port": name, "group": group, **bench.compare(group)})
                add_result(asked.results, lines[-1])
                print(json.dumps(lines[-1]), flush=True)
    keys = ("requests", "tokens", "comparisons", "kills", "moved", "reused", "in_chunks")
    total = {key: sum(line[key] for line in lines) for key in keys}
    # A run in which nothing moved, nothing was reused or no prompt had several chunks has shown nothing of it.
    shown = all(total.values())
    total["differing"] = sum(len(line["differing"]) for line in lines)
    total["other_chunks"] = sum(line["other_chunks"] for line in lines)
    good = shown and not total["differing"] and requests(lines) >= asked.count
    print(json.dumps({"port": name, "total": total, "good": good}), flush=True)
    return good


def requests(lines: Sequence[dict[str, Any]]) -> int:
    return sum(line["requests"] for line in lines)


class Bench(ExitStack):
    """Engines with reuse, without, and with smaller chunks; replicas; a server; all on one port."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__()
        port = open_port(path)
        assert port.spec is not None
        self.context, self.vocab = port.spec.max_context, port.geometry.vocab
        self.buckets = port.spec.buckets
        if len(self.buckets) < 2 or 2 * self.buckets[-1] > self.context:
            raise SystemExit(
                f"error: {path} has the buckets {self.buckets} and a context of {self.context}.\n"
                "hint: Compile one with two, and room for two chunks of the larger."
            )
        self.assets = load_chat_assets(port.source_folder)
        load, preload = replica_loader(port, count)
        known: dict[str, Any] = {
            "tokenizer_file": port.source_folder.resolve() / TOKENIZER_FILE,
            "stop_ids": self.assets.stop_ids,
        }
        self._plain = Engine(lambda: load(0), reuse_prefixes=False, **known)
        self._reusing = Engine(lambda: load(0), **known)
        self._chunked = Engine(lambda: smaller(load), reuse_prefixes=False, **known)
        setup = ReplicaSetup(load=load, **known)
        self._pool = Replicas(count, setup, EmbeddedEngine(preload=list(preload)))
        self._path = path

    def __enter__(self) -> Bench:
        for source in (self._plain, self._reusing, self._chunked, self._pool):
            source.start()
            self.callback(source.close, 10.0)
        self._url = self.enter_context(served(self._path)).url
        self._client = self.enter_context(httpx2.Client(timeout=SECONDS))
        for source in (self._plain, self._reusing, self._chunked):
            if not source.wait_loaded(SECONDS):
                raise SystemExit(f"not loaded: {source.failure}")
        return self

    def compare(self, group: int) -> dict[str, Any]:
        rng, started = random.Random(group), time.monotonic()
        cases = draw_cases(rng, self.assets, self.context, self.vocab)
        requests = [request for case in cases for request in case.requests]
        alone = [run(self._plain, [request])[0] for request in requests]
        before = self._reusing.states()[0].load.prefix_tokens
        found = {"batch": run(self._plain, requests)}
        # Turn by turn, as a chat comes; the last pass finds every beginning read.
        found["reused"] = [run(self._reusing, [request])[0] for request in requests]
        found["reused batch"] = run(self._reusing, requests)
        reused = self._reusing.states()[0].load.prefix_tokens - before
        others = run(self._chunked, requests)
        killer = Killer(self._pool, rng, sum(len(made.tokens) for made in alone))
        found["killed"] = killer.run(requests)
        differing = [
            {"request": i, "how": how, "at": first_difference(one, alone[i])}
            for how, answers in found.items()
            for i, one in enumerate(answers)
            if one != alone[i]
        ]
        return {
            "requests": len(requests),
            "tokens": sum(len(made.tokens) for made in alone),
            "comparisons": len(requests) * (len(found) + 2),
            "kills": killer.kills,
            "moved": killer.moved,
            "reused": reused,
            "in_chunks": sum(len(one.prompt_ids) > self.buckets[-1] for one in requests),
            "other_chunks": sum(a.tokens != b.tokens for a, b in zip(others, alone, strict=True)),
            "differing": differing + self._served(cases, alone),
            "seconds": round(time.monotonic() - started, 1),
        }

    def _served(self, cases: Sequence[Case], alone: Sequence[Made]) -> list[dict[str, Any]]:
        """What the server says otherwise, whole or streamed, several at once."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            both = threads.map(self._whole_and_streamed, cases)
            found, made = [], iter(alone)
            for case, (whole, streamed) in zip(cases, both, strict=True):
                for choice, (one, other) in enumerate(zip(whole, streamed, strict=True)):
                    text, finish = says(self.assets, case, choice, next(made))
                    for how, told in (("served", one), ("streamed", other)):
                        if (told.text, told.finish) != (text, finish):
                            wanted = f"{text[-80:]!r} {finish}"
                            got = f"{told.text[-80:]!r} {told.finish}"
                            found.append({"body": case.body, "how": how, "got": got, "not": wanted})
                    if one.answer != other.answer:
                        found.append({"body": case.body, "how": "streamed to served"})
        return found

    def _whole_and_streamed(self, case: Case) -> tuple[list[Told], list[Told]]:
        whole = whole_completion(self._client, self._url, case.body)
        return whole, stream_completion(self._client, self._url, case.body)


def smaller(load: LoadRunner) -> Runner:
    """A runner that reads prompts without its largest bucket: in more chunks than the port does."""
    runner = load(0)
    runner.prefill_buckets = runner.prefill_buckets[:-1]
    return runner


class Killer:
    """Kills replicas in the midst of their answers: each at a moment drawn over the tokens of all of them."""

    def __init__(self, pool: Replicas, rng: random.Random, tokens: int) -> None:
        self._pool = pool
        self._at = sorted(rng.randrange(1, max(tokens * 3 // 4, 2)) for _ in range(KILLS))
        self._told = self.kills = self.moved = 0

    def run(self, requests: Sequence[GenerationRequest]) -> list[Made]:
        self._all_ready()
        tickets: list[Ticket] = []
        found = run(self._pool, requests, self._heard, tickets)
        self.moved = sum(ticket.moves > 0 for ticket in tickets)
        return found

    def _heard(self, event: TokenEvent) -> None:
        """Kill the replica that said this, when it is time."""
        self._told += event.token is not None
        if not self._at or self._told < self._at[0]:
            return
        state = self._pool.states()[event.replica]
        if state.phase == "ready" and state.pid:
            self._at.pop(0)
            os.kill(state.pid, signal.SIGKILL)
            self.kills += 1

    def _all_ready(self) -> None:
        while any(state.phase != "ready" for state in self._pool.states()):
            if self._pool.failure is not None:
                raise SystemExit(f"replicas failed: {self._pool.failure}")
            time.sleep(0.02)


def run(
    source: TokenSource,
    requests: Sequence[GenerationRequest],
    heard: Callable[[TokenEvent], None] = lambda _: None,
    handles: list[Any] | None = None,
) -> list[Made]:
    """What is made for each, all in the source at once. `handles` gets what `submit` gives."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    tokens: list[list[int]] = [[] for _ in requests]
    scores: list[list[TokenLogprob]] = [[] for _ in requests]
    ends = ["" for _ in requests]
    for i, request in enumerate(requests):
        handle = source.submit(replace(request, tag=i), events.put)
        if handles is not None:
            handles.append(handle)
    while not all(ends):
        event = events.get(timeout=SECONDS)
        scores[event.tag] += event.prompt or ()
        if event.token is not None:
            tokens[event.tag].append(event.token)
        if event.logprob is not None:
            scores[event.tag].append(event.logprob)
        heard(event)
        if event.finish is not None:
            ends[event.tag] = event.finish
            if event.finish not in ("stop", "length"):
                raise SystemExit(f"a request ended with {event.finish}: {event.error}")
    return [
        Made(tuple(one), end, tuple(told))
        for one, end, told in zip(tokens, ends, scores, strict=True)
    ]


def first_difference(one: Made, other: Made) -> str:
    """Where two answers part, for people."""
    if one.tokens == other.tokens:
        places = zip(one.scores, other.scores, strict=False)
        first = next((i for i, (a, b) in enumerate(places) if a != b), None)
        return f"same tokens, log-probabilities differ from place {first}"
    places_of = zip(one.tokens, other.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(places_of) if a != b), "the shorter one's end")
    return f"token {at} of {len(other.tokens)}"


if __name__ == "__main__":
    sys.exit(main())
