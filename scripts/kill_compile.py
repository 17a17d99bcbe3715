"""Kill `compile` at random moments, run it again, and compare what is left with an undisturbed run.

A case: the command in an empty folder, one SIGKILL to the controller, a worker or a compiler (drawn by the case's seed)
at a moment drawn over the undisturbed run's time, then the same command until it ends by itself. Held: exactly one
`built` line a unit over all lives, rank files byte-equal, graph keys equal, logits of a fixed prompt bit-equal, no more
units begun again than were in flight, nothing of a killed controller left after two seconds. Each case is one JSON
line of the result file; started again, the script goes on where it stopped.
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
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.result_file import add_result, read_results  # noqa: E402

ORPHAN_SECONDS = 2.0
LONGEST_RUN_SECONDS = 1800
VICTIMS = ("controller", "worker", "compiler")
PROMPT = [2, 9, 17, 33, 5, 41, 12, 7]
FLAGS = {
    "tiny": "--tp 2 --dtype float32 --max-context 48 --slots 3 --buckets 24",
    "bundled": "--tp 8 --max-context 1024",
}


@dataclass(frozen=True)
class Undisturbed:
    """What a case is compared with. `seconds`: how long it took, the span a moment is drawn from."""

    seconds: float
    ranks: dict[str, str]
    keys: dict[str, str]
    logits: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="cases, over all runs")
    parser.add_argument("--minutes", type=float, help="stop beginning cases after so many")
    parser.add_argument("--results", type=Path, default=Path("kill-compile-results.jsonl"))
    parser.add_argument("--bundled", action="store_true", help="the bundled model, not a tiny one")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    model = "bundled" if asked.bundled else "tiny"
    work = asked.results.with_suffix(f".{model}")
    work.mkdir(parents=True, exist_ok=True)
    source = source_of(model, work)
    reference = undisturbed(source, model, work)
    print(f"undisturbed: {len(reference.keys)} units in {reference.seconds:.0f} s", flush=True)
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    for number in range(asked.count):
        done = {line["case"] for line in read_results(asked.results) if line["model"] == model}
        if number in done:
            continue
        if time.monotonic() > end:
            break
        line = {"case": number, "model": model}
        line |= one_case(random.Random(f"{asked.seed} {number}"), source, model, work, reference)
        add_result(asked.results, line)
        print(json.dumps(line), flush=True)
    return totals(read_results(asked.results))


def source_of(model: str, work: Path) -> Path:
    if model == "bundled":
        return ROOT / "gemma_neuron" / "data" / "demo-model"
    from tests.pipeline.conftest import tiny_source

    return work / "source" if (work / "source").is_dir() else tiny_source(work / "source")


def undisturbed(source: Path, model: str, work: Path) -> Undisturbed:
    """The run all cases are compared with, made once and kept beside the results."""
    kept, port = work / "undisturbed.json", work / "undisturbed"
    if not kept.is_file():
        shutil.rmtree(port, ignore_errors=True)
        started = time.monotonic()
        process = start(source, model, port)
        if process.wait(LONGEST_RUN_SECONDS) != 0:
            raise SystemExit((port.parent / "log").read_text()[-2000:])
        seconds = time.monotonic() - started
        kept.write_text(json.dumps({"seconds": seconds, **facts_of(port)}))
    return Undisturbed(**json.loads(kept.read_text()))


def start(source: Path, model: str, port: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gemma_neuron", "compile", str(source), "--out", str(port)]
    with (port.parent / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--backend", "cpu", *FLAGS[model].split()],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )


def facts_of(port: Path) -> dict[str, Any]:
    """What is compared: digests of rank files, keys of graphs, logits of the prompt's last token."""
    from gemma_neuron.artifacts import digest_file
    from gemma_neuron.pipeline import open_port, runner_factory

    opened = open_port(port)
    ranks = sorted(opened.weights_folder.glob("*.safetensors"))
    keys = {}
    for unit in opened.spec.units():
        keys[unit.name] = opened.unit_set(unit).verify().facts["key_digest"]
    runner = runner_factory(opened)()
    logits = runner.prefill(PROMPT, slot=0, start=0)
    runner.close()
    return {
        "ranks": {path.name: digest_file(path) for path in ranks},
        "keys": keys,
        "logits": [float(value) for value in logits],
    }


def one_case(
    chance: random.Random, source: Path, model: str, work: Path, reference: Undisturbed
) -> dict[str, Any]:
    port = work / "case"
    shutil.rmtree(port, ignore_errors=True)
    victim, moment = chance.choice(VICTIMS), chance.uniform(0, reference.seconds)
    started = time.monotonic()
    process = start(source, model, port)
    facts = kill(process, port, victim, moment)
    lives, code = 1, process.wait(LONGEST_RUN_SECONDS)
    problems = facts.pop("problems")
    if facts["killed"] != "controller" and code != 0:
        problems.append(f"exit {code} after the {facts['killed']} was killed")
    for _ in range(2):  # the second finds nothing to do
        code, lives = start(source, model, port).wait(LONGEST_RUN_SECONDS), lives + 1
        if code != 0:
            problems.append(
                f"life {lives} ended with exit {code}: {(work / 'log').read_text()[-300:]}"
            )
    if code == 0:
        problems += differences(port, reference, facts)
    return {
        "victim": victim,
        "moment": round(moment, 2),
        **facts,
        "seconds": round(time.monotonic() - started, 1),
        "outcome": "ok" if not problems else "; ".join(problems),
    }


def kill(
    process: subprocess.Popen[bytes], port: Path, victim: str, moment: float
) -> dict[str, Any]:
    """Wait for the moment, kill, and watch that nothing of a killed controller stays."""
    facts: dict[str, Any] = {"killed": "nothing", "in_flight": 0, "problems": []}
    try:
        process.wait(moment)
        return facts  # it was quicker this time
    except subprocess.TimeoutExpired:
        controller = psutil.Process(process.pid)
    tree = controller.children(recursive=True)
    started = [line for line in events(port) if line["event"] == "worker_started"]
    workers = {line["worker_pid"] for line in started}
    committed = {path.parent.name for path in port.glob("graphs/*/graph.committed")}
    choice = [p for p in tree if (p.pid in workers if victim == "worker" else is_compiler(p))]
    target = controller if victim == "controller" or not choice else choice[-1]
    facts["in_flight"] = len({line["unit"] for line in started} - committed)
    facts["killed"] = "controller" if target is controller else victim
    target.kill()
    if target is controller:
        killed = time.monotonic()
        _, alive = psutil.wait_procs(tree, timeout=ORPHAN_SECONDS)
        facts["last_gone_seconds"] = round(time.monotonic() - killed, 3)
        if alive:
            facts["problems"].append(f"{len(alive)} processes outlived their controller")
    return facts


def is_compiler(process: psutil.Process) -> bool:
    try:
        return process.name() in ("cc1plus", "g++", "clang++", "ld", "as", "collect2")
    except psutil.Error:
        return False


def events(port: Path) -> list[dict[str, Any]]:
    from gemma_neuron.port import Port

    return Port(port).events()


def differences(port: Path, reference: Undisturbed, facts: dict[str, Any]) -> list[str]:
    """What is not as it has to be."""
    from gemma_neuron.port import Port

    found = facts_of(port)
    problems = [
        f"{name} differ from the undisturbed run's"
        for name in ("ranks", "keys", "logits")
        if found[name] != getattr(reference, name)
    ]
    built = Counter(line["unit"] for line in Port(port).ledger() if line["outcome"] == "built")
    if built != Counter(list(reference.keys)):
        problems.append(f"built lines: {dict(built)}")
    starts = sum(line["event"] == "worker_started" for line in events(port))
    facts["begun_again"] = starts - len(reference.keys)
    if facts["begun_again"] > facts["in_flight"]:
        problems.append(f"{facts['begun_again']} units begun again, {facts['in_flight']} in flight")
    return problems


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals from the result file; 1 when any case ended otherwise than ok."""
    for model in sorted({line["model"] for line in lines}):
        mine = [line for line in lines if line["model"] == model]
        killed = ", ".join(f"{n} {who}" for who, n in Counter(x["killed"] for x in mine).items())
        gone = max((line.get("last_gone_seconds", 0) for line in mine), default=0)
        again = sum(line.get("begun_again", 0) for line in mine)
        flight = sum(line["in_flight"] for line in mine)
        bad = [line for line in mine if line["outcome"] != "ok"]
        print(
            f"{model}: {len(mine)} cases (killed: {killed}), {len(bad)} not ok; {again} units begun again of "
            f"{flight} in flight; last process gone after at most {gone:.2f} s"
        )
        for line in bad:
            print(f"  case {line['case']}: {line['outcome']}")
    return 1 if any(line["outcome"] != "ok" for line in lines) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    sys.exit(main())
