"""Owners, bad networks and lost machines, many times over, as one JSON line a case.

start: two processes take one prefix at once; exactly one may get it.
sleeper: the owner is stopped (SIGSTOP) at a random moment of its push, another takes over when the lease is stale and
commits, the first wakes; nothing of the second's may change.
proxy: a port is pushed and pulled through a proxy that cuts, delays, shortens, flips and refuses; it comes back whole.
story: a compile with its mirror behind that proxy gets SIGTERM at a random moment, its folder is deleted, the same
command in an empty folder ends it; units built over all lives are the units of the plan.
restart: the same story before a store on disk (rclone's) that is killed and started again all the while.

Started again, the script goes on until the cases are complete over all its starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sources.processes import Commands

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.result_file import add_result, read_results  # noqa: E402

BUCKET = "soak"
STALE_SECONDS = 4.0
MOST_TRIES = 6
COUNTS = {"start": 100, "sleeper": 20, "proxy": 20, "story": 20, "restart": 20}
"""Cases of each kind, unless told otherwise."""


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return worker()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, help="cases, over all runs")
    parser.add_argument("--share", type=float, default=0.1, help="of requests that meet a fault")
    parser.add_argument("--minutes", type=float, help="stop beginning cases after so many")
    parser.add_argument("--results", type=Path, default=Path("soak-mirror-results.jsonl"))
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    done = {line["case"] for line in read_results(asked.results)}
    cases = {
        "start": start,
        "sleeper": sleeper,
        "proxy": proxied_port,
        "story": story,
        "restart": restart,
    }
    planned = [(f"{kind} {n}", kind) for kind in cases for n in range(getattr(asked, kind))]
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), asked.share) as bench:
        for case, kind in planned:
            if case in done:
                continue
            if time.monotonic() > end:
                break
            started = time.monotonic()
            try:
                line = cases[kind](bench, case)
            except Exception as error:
                line = {"outcome": f"{type(error).__name__}: {str(error)[-600:]}"}
            line = {"case": case, "seconds": round(time.monotonic() - started, 1)} | line
            add_result(asked.results, line)
            print(json.dumps(line), flush=True)
    return totals(read_results(asked.results))


class Bench:
    """A store on loopback, two worker processes, and a port to move."""

    def __init__(self, folder: Path, share: float) -> None:
        self.folder, self.share = folder, share

    def __enter__(self) -> Bench:
        from tests.sources.processes import clean_environment
        from tests.sources.s3_servers import KEYS, boto, moto

        self._server = moto()
        self.address = self._server.__enter__()
        self.client = boto(self.address)
        self.client.create_bucket(Bucket=BUCKET)
        own = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL_S3": self.address}
        self.environment = clean_environment() | KEYS | own
        self.workers = [Worker(self.environment) for _ in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.workers:
            one.close()
        self._server.__exit__(None, None, None)

    def commands(self) -> Commands:
        from tests.sources.processes import Commands

        return Commands(self.environment)

    def source(self) -> Path:
        from tests.pipeline.conftest import tiny_source

        folder = self.folder / "source"
        return folder if folder.exists() else tiny_source(folder)

    def port(self) -> Path:
        """Rank files and records, without graphs: what moves is files either way."""
        from tests.sharding.shards import cut

        out = self.folder / "port"
        if not out.exists():
            cut(self.source(), out, 2)
        return out

    def objects(self, prefix: str) -> dict[str, str]:
        """Key → ETag."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {row["Key"]: row["ETag"] for page in pages for row in page.get("Contents", [])}


class Worker:
    """A process that takes leases and pushes ports, told by lines of JSON."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def worker() -> int:
    """The other side of Worker."""
    from gemma_neuron.errors import GemmaNeuronError
    from gemma_neuron.mirror.layout import port_location, raw_location
    from gemma_neuron.mirror.owner import acquire
    from gemma_neuron.mirror.push import Pusher
    from gemma_neuron.mirror.store import Store
    from gemma_neuron.port import Port

    owner: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {"did": order["do"]}
        try:
            if order["do"] == "take":
                time.sleep(max(0.0, order["at"] - time.time()))
                store = Store(port_location(order["uri"], "p"))
                owner = acquire(store, lambda _: None, stale=STALE_SECONDS)
                answer["generation"] = owner.generation
            elif order["do"] == "push":
                store, raw = owner.store, Store(raw_location(order["uri"]))
                pusher = Pusher(Port(Path(order["port"])), store, raw, owner)
                for name in pusher.waiting():
                    pusher.push_set(name)
            else:
                owner.release()
        except GemmaNeuronError as error:
            answer["error"] = type(error).__name__
        print(json.dumps(answer), flush=True)
    return 0


def start(bench: Bench, case: str) -> dict[str, Any]:
    uri = f"s3://{BUCKET}/{case.replace(' ', '-')}"
    at = time.time() + 0.1
    for one in bench.workers:
        one.tell(do="take", uri=uri, at=at)
    answers = [one.hear() for one in bench.workers]
    generations = [answer.get("generation") for answer in answers]
    refused = [answer.get("error") for answer in answers]
    for one, generation in zip(bench.workers, generations, strict=True):
        if generation is not None:
            one.ask(do="release")
    good = sorted(map(str, generations)) == ["1", "None"] and "MirrorInUseError" in refused
    return {"outcome": "ok" if good else f"{answers}"}


def sleeper(bench: Bench, case: str) -> dict[str, Any]:
    from gemma_neuron.port import Port

    chance, uri = random.Random(case), f"s3://{BUCKET}/{case.replace(' ', '-')}"
    mine, theirs = bench.port(), bench.folder / case
    shutil.copytree(mine, theirs)
    marked = Port(theirs).rank_set(0)
    manifest = marked.manifest()
    assert manifest is not None
    # the second's files differ: a compiler's output need not be the same twice
    marked.commit_entries(manifest.files, manifest.facts | {"by": case})
    first, second = bench.workers
    assert first.ask(do="take", uri=uri, at=0.0).get("generation") == 1
    first.tell(do="push", uri=uri, port=str(mine))
    time.sleep(chance.uniform(0.0, 0.6))
    os.kill(first.process.pid, signal.SIGSTOP)
    before = len(bench.objects(f"{case.replace(' ', '-')}/"))
    try:
        took = second.ask(do="take", uri=uri, at=0.0)
        pushed = second.ask(do="push", uri=uri, port=str(theirs))
        there = bench.objects(f"{case.replace(' ', '-')}/")
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    woke = first.hear()
    after = bench.objects(f"{case.replace(' ', '-')}/")
    second.ask(do="release")
    first.ask(do="release")
    changed = [
        key
        for key, etag in there.items()
        if after.get(key) != etag and not key.endswith("owner.json")
    ]
    added = [key for key in after if key not in there and "/blobs/" not in key]
    problems = []
    if took.get("generation") != 2 or "error" in pushed:
        problems.append(f"the second: {took}, {pushed}")
    if changed or added:
        problems.append(f"changed {changed}, added {added}")
    fields = {
        "objects_when_stopped": before,
        "first_ended": woke.get("error", "done before it was stopped"),
    }
    return {**fields, "outcome": "; ".join(problems) or "ok"}


def proxied_port(bench: Bench, case: str) -> dict[str, Any]:
    from tests.sources.bad_proxy import bad_proxy
    from tests.sources.processes import Commands

    uri, pulled = f"s3://{BUCKET}/{case.replace(' ', '-')}", bench.folder / case
    port, tries, said = bench.folder / f"{case}-port", Counter[str](), list[str]()
    shutil.copytree(bench.port(), port)
    with bad_proxy(bench.address, bench.share, case) as proxy:
        commands = Commands(bench.environment | {"AWS_ENDPOINT_URL_S3": proxy.address})
        for verb, folder in (("push", port), ("pull", pulled)):
            code = 1
            while code != 0 and tries[verb] < MOST_TRIES:
                tries[verb] += 1
                found = commands.run("mirror", verb, folder, uri)
                code = found.returncode
                assert code in (0, 5, 8, 75) and "Traceback" not in found.stderr, found.stderr
                said += [] if code == 0 else [f"{verb} {code}: {_end(found)}"]
            assert code == 0, found.stderr
    # a push writes events of its own, and a lock is a machine's
    files = [
        p.relative_to(port)
        for p in port.rglob("*")
        if p.is_file() and p.name not in (".lock", "events.jsonl")
    ]
    wrong = [
        str(name)
        for name in files
        if not (pulled / name).is_file()
        or (port / name).read_bytes() != (pulled / name).read_bytes()
    ]
    fields = {
        "requests": proxy.requests,
        "faults": dict(proxy.met),
        "runs": dict(tries),
        "said": said,
    }
    return {**fields, "outcome": f"differ: {wrong}" if wrong else "ok"}


def _end(found: subprocess.CompletedProcess[str]) -> str:
    """What a command that did not end well said last."""
    lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
    bad = [line for line in lines if line.startswith(("BAD", "error:"))]
    return " | ".join((bad or lines)[-3:])[:600]


def story(bench: Bench, case: str) -> dict[str, Any]:
    from scripts import mirror_stories

    commands = bench.commands()
    return mirror_stories.story(
        bench.source(), bench.folder, bench.address, commands, case, bench.share
    )


def restart(bench: Bench, case: str) -> dict[str, Any]:
    from scripts import mirror_stories

    return mirror_stories.restart(bench.source(), bench.folder, bench.commands(), case)


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals a kind from the result file; 1 when any case failed."""
    kinds = defaultdict(list)
    for line in lines:
        kinds[line["case"].split()[0]].append(line)
    for kind, mine in kinds.items():
        good = sum(line["outcome"] == "ok" for line in mine)
        faults = sum((Counter(line.get("faults", {})) for line in mine), Counter())
        met = f"; faults met: {dict(faults)}" if faults else ""
        ends = Counter(line["first_ended"] for line in mine if "first_ended" in line)
        print(
            f"{kind}: {good} of {len(mine)} ok{met}{f'; first ended: {dict(ends)}' if ends else ''}"
        )
    broken = [line for line in lines if line["outcome"] != "ok"]
    for line in broken:
        print(f"BROKEN {json.dumps(line)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
