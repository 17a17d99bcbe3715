"""Faults put to the replicas of a loaded server, and what its clients see of them: nothing but a pause.

First each of a set of random requests is answered alone. Then clients stream them all the time, and each answer must
come, and be that one: every token, its log-probability, the text, the reason it ended. A fault is a SIGKILL, each third
time a SIGSTOP, each tenth time all replicas at once, when every replica serves. Held: it is noticed, a process takes
the place, and all serve again within the bounds below; with all of them gone the server says that it is not ready; a
stream stands still no longer than the bounds allow. Memory and descriptors stay flat over the recoveries of a run, and
nothing of a killed controller stays. One JSON line a fault; started again, the script goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402

from gemma_neuron.chat import load_chat_assets  # noqa: E402
from gemma_neuron.pipeline import open_port  # noqa: E402
from scripts.equality_cases import draw_case  # noqa: E402
from scripts.result_file import add_result, read_results  # noqa: E402
from scripts.served import (  # noqa: E402
    NotReady,
    Server,
    bundled,
    flatness,
    served,
    stream_completion,
)

NOTICED_SECONDS = 0.5
"""From a SIGKILL to the fault's being known; from a SIGSTOP it is --hang-after and HUNG_SECONDS."""
HUNG_SECONDS = 1.0
REPLACED_SECONDS = 5.0
"""From there to a process in its place."""
MOVED_SECONDS = 5.0
"""For which a stream stands still beside: the other replica reads its prompt and its tokens again."""
READY_SECONDS = 60.0
"""From a fault to full strength, loading included."""
GONE_SECONDS = 2.0
"""From the controller's death to that of everything it started."""
CASES = 24
FEWEST_FOR_FLATNESS = 8
SHAPE = ("--tp", "2", "--max-context", "256", "--slots", "4", "--buckets", "32,64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=Path, nargs="?", help="default: the bundled model's, made")
    parser.add_argument("--count", type=int, default=100, help="faults, over all runs")
    parser.add_argument("--minutes", type=float, help="put no fault after so many")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--hang-after", type=float, default=10.0)
    parser.add_argument("--results", type=Path, default=Path("kill-serve-results.jsonl"))
    parser.add_argument("--work", type=Path, default=Path("kill-serve-port"))
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    done = [line for line in read_results(asked.results) if "fault" in line]
    if len(done) < asked.count:
        one_life(asked, range(len(done), asked.count), end)
    return totals(read_results(asked.results), asked.count)


def one_life(asked: argparse.Namespace, faults: Sequence[int], end: float) -> None:
    """A server from its start to its death."""
    port = asked.port or bundled(asked.work, *SHAPE)
    flags = ["--replicas", str(asked.replicas), "--hang-after", str(asked.hang_after)]
    with served(port, *flags) as server:
        server.wait_ready(asked.replicas, READY_SECONDS)
        load = Load(server, requests_of(port))
        load.start(asked.clients)
        breaker = Breaker(server, load, asked.replicas, asked.hang_after)
        try:
            for number in faults:
                if time.monotonic() > end:
                    break
                line = {"fault": number, "life": server.process.pid, **breaker.fault(number)}
                add_result(asked.results, line)
                print(json.dumps(line), flush=True)
        finally:
            load.end()
        line = {"life": server.process.pid, "controller": server.kill(GONE_SECONDS)}
        line["wrong"] = load.take()["wrong"]  # what was under way at the end
        add_result(asked.results, line)
        print(json.dumps(line), flush=True)


def requests_of(port: Path) -> list[dict[str, Any]]:
    """Bodies of random requests with one choice, which tell every token."""
    opened = open_port(port)
    assert opened.spec is not None
    assets, rng = load_chat_assets(opened.source_folder), random.Random(0)
    context, vocab = opened.spec.max_context, opened.geometry.vocab
    bodies = []
    for _ in range(CASES):
        length = rng.randrange(1, context // 2)
        ids = [assets.tokenizer.bos_id, *(rng.randrange(110, vocab) for _ in range(length))]
        case = draw_case(rng, assets, ids, vocab, most_choices=1)
        bodies.append({**case.body, "logprobs": 0, "max_tokens": rng.randrange(20, context // 3)})
    return bodies


class Load:
    """Clients that stream the requests, and compare."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]]) -> None:
        self._server, self._bodies = server, bodies
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._counts: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._gap = 0.0
        self._threads: list[threading.Thread] = []
        with httpx2.Client(timeout=300.0) as client:
            self._alone = [stream_completion(client, server.url, body)[0] for body in bodies]

    def start(self, clients: int) -> None:
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> dict[str, Any]:
        """Answers, refusals while not ready, what was wrong, the longest silence, since the last call."""
        with self._lock:
            found = {
                "answers": self._counts["answers"],
                "refused": self._counts["refused"],
                "wrong": self._wrong,
                "longest_gap_seconds": round(self._gap, 3),
            }
            self._counts, self._wrong, self._gap = Counter(), [], 0.0
        return found

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        with httpx2.Client(timeout=300.0) as client:
            while not self._stop.is_set():
                self._one(client, rng.randrange(len(self._bodies)))

    def _one(self, client: httpx2.Client, i: int) -> None:
        wrong = None
        try:
            (told,) = stream_completion(client, self._server.url, self._bodies[i])
        except NotReady:
            with self._lock:
                self._counts["refused"] += 1
            self._stop.wait(0.1)
            return
        except Exception as error:  # whatever it is, a client went without its answer
            wrong = f"request {i}: no answer: {type(error).__name__}: {error}"[:400]
        else:
            if told.answer != self._alone[i].answer:
                wrong = f"request {i}: {told.answer} is not {self._alone[i].answer}"[:2000]
        with self._lock:
            self._counts["answers"] += 1
            if wrong is not None:
                self._wrong.append(wrong)
            else:
                self._gap = max(self._gap, told.gap[0])


class Breaker:
    """Puts one fault after the other to a server."""

    def __init__(self, server: Server, load: Load, replicas: int, hang_after: float) -> None:
        self._server, self._load = server, load
        self._replicas, self._hang_after = replicas, hang_after

    def fault(self, number: int) -> dict[str, Any]:
        """One fault, from full strength to full strength."""
        what = "all" if number % 10 == 9 else "SIGSTOP" if number % 3 == 2 else "SIGKILL"
        rng = random.Random(number)
        self._load.take()
        time.sleep(rng.uniform(0.0, 1.0))
        victims, before = self._server.ready(), self._restarts()
        if what != "all":
            victims = [rng.choice(victims)]
        signalled = time.monotonic()
        for victim in victims:
            os.kill(victim["pid"], signal.SIGSTOP if what == "SIGSTOP" else signal.SIGKILL)
        line: dict[str, Any] = {"what": what, **self._watch(victims, before, signalled)}
        time.sleep(0.5)  # streams that stood still go on
        line |= self._load.take() | self._server.sample()
        line["outcome"] = self._outcome(line) or "ok"
        return line

    def _watch(
        self, victims: Sequence[dict[str, int]], before: dict[int, int], signalled: float
    ) -> dict[str, Any]:
        """Seconds from the signal to each thing that has to follow; None for what did not."""
        gone, indices = {victim["pid"] for victim in victims}, {v["index"] for v in victims}
        found: dict[str, Any] = {"noticed": None, "replaced": None, "ready": None}
        unready = False
        now = 0.0
        while now < READY_SECONDS + self._hang_after:
            state = self._server.readiness()
            now = time.monotonic() - signalled
            pids = {replica["pid"] for replica in state["replicas"]}
            unready = unready or state["status"] != "ready"
            if found["noticed"] is None and not gone & pids:
                found["noticed"] = round(now, 3)
            after = {s["index"]: s["restarts"] for s in state["progress"]["states"]}
            if found["replaced"] is None and all(after[i] > before[i] for i in indices):
                found["replaced"] = round(now, 3)
            if found["replaced"] is not None and len(pids) == self._replicas and not gone & pids:
                found["ready"] = round(now, 3)
                break
            time.sleep(0.01)
        return {f"{key}_seconds": value for key, value in found.items()} | {"unready": unready}

    def _restarts(self) -> dict[int, int]:
        states = self._server.readiness()["progress"]["states"]
        return {state["index"]: state["restarts"] for state in states}

    def _outcome(self, line: dict[str, Any]) -> str:
        """What was not as it has to be."""
        noticed = NOTICED_SECONDS
        if line["what"] == "SIGSTOP":
            noticed = self._hang_after + HUNG_SECONDS
        everyone = line["what"] == "all" or self._replicas == 1
        bounds = {
            "noticed_seconds": noticed,
            "replaced_seconds": noticed + REPLACED_SECONDS,
            "ready_seconds": noticed + READY_SECONDS,
            "longest_gap_seconds": noticed + (READY_SECONDS if everyone else MOVED_SECONDS),
        }
        problems = [
            f"{key} {line[key]}, at most {bound:g}"
            for key, bound in bounds.items()
            if line[key] is None or line[key] > bound
        ]
        if everyone != line["unready"]:
            problems.append("ready with no replica" if everyone else "not ready with one left")
        problems += line["wrong"]
        return "; ".join(problems)


def totals(lines: list[dict[str, Any]], count: int) -> int:
    """Print totals from the result file; 1 unless every fault was put and all was well."""
    faults = [line for line in lines if "fault" in line]
    ends = [line for line in lines if "fault" not in line]
    bad = [line for line in faults if line["outcome"] != "ok"]
    lives = {line["life"] for line in faults}
    flat = {life: flatness([x for x in faults if x["life"] == life]) for life in lives}
    longest = max((sum(x["life"] == life for x in faults) for life in lives), default=0)
    swollen = [
        {"life": life, "what": name, **facts}
        for life, found in flat.items()
        for name, facts in found.items()
        if not facts["flat"] and sum(x["life"] == life for x in faults) >= FEWEST_FOR_FLATNESS
    ]
    worst: dict[str, dict[str, float]] = {}
    for line in faults:
        of = worst.setdefault(line["what"], {})
        for key in ("noticed_seconds", "replaced_seconds", "ready_seconds", "longest_gap_seconds"):
            of[key] = max(of.get(key, 0.0), READY_SECONDS if line[key] is None else line[key])
    wrong = sum(len(line["wrong"]) for line in lines)
    outlived = [line["controller"] for line in ends if not line["controller"].startswith("ok")]
    good = len(faults) >= count and longest >= min(count, FEWEST_FOR_FLATNESS)
    good &= not (bad or swollen or wrong or outlived)
    total = {
        "good": good,
        "faults": dict(Counter(line["what"] for line in faults)),
        "not_ok": len(bad),
        "answers": sum(line["answers"] for line in faults),
        "refused_while_not_ready": sum(line["refused"] for line in faults),
        "wrong": wrong,
        "worst": worst,
        "most_recoveries_of_a_run": longest,
        "not_flat": swollen,
        "outlived_their_controller": outlived,
    }
    print(json.dumps({"total": total}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
