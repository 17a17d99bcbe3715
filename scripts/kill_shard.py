"""SIGKILL at random moments of `shard`, each time resumed: the same bytes, and no committed rank written twice.

First a run that nobody disturbs, for its digests and its duration. Then case by case: a run killed at a random moment
of that duration, and the same command again until it is done. A case is good when every rank file has the digest of the
undisturbed run (read from the disk, not from the manifest), each rank that was committed when the kill came is still
the same file, not written to, and nothing half-written is left. One JSON line a case; started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron.artifacts import digest_file
from scripts.bench_shard import ROOT, command, need_slice, say
from scripts.result_file import read_results

Seen = dict[str, tuple[int, int]]
"""Rank file of each committed rank → inode and time of the last write."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", type=Path, default=Path("slice31"), help="made if not there")
    parser.add_argument("--work", type=Path, help="folder for the ports; default: beside")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--count", type=int, default=20, help="cases, over all runs")
    parser.add_argument("--minutes", type=float, help="begin no case after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("kill-shard-results.jsonl"))
    asked = parser.parse_args()
    need_slice(asked.slice)
    work = (asked.work or asked.slice.parent) / "kill-shard-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    started = time.monotonic()
    try:
        killer = Killer(asked.slice.resolve(), work.resolve() / "port", asked.tp)
        for number in range(len(read_results(asked.results)), asked.count):
            if asked.minutes and time.monotonic() - started > asked.minutes * 60:
                break
            line = killer.case(random.Random(f"{asked.seed}-{number}"))
            with asked.results.open("a") as file:
                file.write(json.dumps({"case": number, **line}) + "\n")
            say(json.dumps({"case": number, **line}))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return totals(read_results(asked.results))


class Killer:
    """Cases against one undisturbed run, whose port is `out` at first."""

    def __init__(self, source: Path, out: Path, tp: int) -> None:
        self.out, self.tp = out, tp
        self.command = command("shard", source, "--out", out, "--tp", tp, "--json")
        started = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - started
        self.wanted = self.digests()
        self.record = (out / "source.json").read_bytes()
        shutil.rmtree(out)

    def finish(self) -> dict[str, Any]:
        """The run to its end; its answer."""
        done = subprocess.run(self.command, capture_output=True, text=True, check=True, cwd=ROOT)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def case(self, draw: random.Random) -> dict[str, Any]:
        moment = draw.uniform(0.0, self.seconds)
        while not self.killed_at(moment):
            moment *= 0.9  # that run was quicker than the first
        before = self.committed()
        units = self.finish()["units"]
        after = self.committed()
        rewritten = sorted(name for name, seen in before.items() if after.get(name) != seen)
        digests = self.digests()
        wrong = sorted(name for name, digest in self.wanted.items() if digests.get(name) != digest)
        left = [path.name for path in self.out.rglob("*.partial")]
        same_record = (self.out / "source.json").read_bytes() == self.record
        good = not rewritten and not wrong and not left and same_record
        good &= units["built"] == self.tp - len(before)
        shutil.rmtree(self.out)
        return {
            "outcome": "ok" if good else "broken",
            "killed_after_seconds": round(moment, 3),
            "of_seconds": round(self.seconds, 1),
            "committed": len(before),
            "built_after": units["built"],
            "rewritten": rewritten,
            "wrong": wrong,
            "left": left,
            "same_source_record": same_record,
        }

    def killed_at(self, moment: float) -> bool:
        """Whether the kill came before the run had ended; a port that was finished is removed."""
        child = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            return True
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, self.command)
        shutil.rmtree(self.out)
        return False

    def committed(self) -> Seen:
        weights = self.out / "weights"
        files = (path.with_suffix(".safetensors") for path in weights.glob("*.committed"))
        return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}

    def digests(self) -> dict[str, str]:
        files = sorted((self.out / "weights").glob("*.safetensors"))
        return {file.name: digest_file(file) for file in files}


def totals(lines: list[dict[str, Any]]) -> int:
    broken = [line for line in lines if line["outcome"] != "ok"]
    spread = sorted(line["committed"] for line in lines)
    print(f"{len(lines)} kills, {len(broken)} broken; ranks committed when killed: {spread}")
    for line in broken:
        print(f"BROKEN {json.dumps(line)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
