"""One job, one kill of a rank in the middle, three ways to run it: seconds to the next step, steps lost, JSON lines.

torchrun restarts all ranks; by default they read the dead rank's address from the store that the agents share, and
wait for it until a timeout far beyond `--patience`. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from gemma_neuron.artifacts import json_lines
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.tuning.data import read_samples, sample_file
from scripts.tune.plain_ddp import SAVE_EVERY
from scripts.tune.tiny_job import ROOT, Run, make_job

STEPS, KILL_AT = 200, 12
WAYS = ("torchrun", "torchrun, store not shared", "tune --elastic pause", "tune --elastic resize")
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Watched:
    """A running job: which process each rank is, when which step was done, when its ranks began (again)."""

    def __init__(
        self,
        process: subprocess.Popen[Any],
        ranks: Callable[[], dict[int, int]],
        steps: Path,
        begun: Callable[[], list[float]],
    ) -> None:
        self.process, self.ranks, self.steps, self.begun = process, ranks, steps, begun

    def done(self) -> list[tuple[float, int]]:
        return [(line["time"], line["step"]) for line in json_lines(self.steps) if "step" in line]

    def kill_and_wait(self, rank: int, patience: float) -> dict[str, Any]:
        while not any(step >= KILL_AT for _, step in self.done()):
            if self.process.poll() is not None:
                return {"outcome": f"ended by itself with {self.process.returncode}"}
            time.sleep(0.01)
        os.kill(self.ranks()[rank], signal.SIGKILL)
        killed = time.time()
        while time.time() - killed < patience and self.process.poll() is None:
            again = [moment for moment in self.begun() if moment > killed]
            first = next((pair for pair in self.done() if again and pair[0] > again[0]), None)
            if first is not None:
                # a step that was under way at the kill may still have been done
                reached = max(step for moment, step in self.done() if moment < again[0])
                return {
                    "outcome": "recovered",
                    "seconds": round(first[0] - killed, 3),
                    "lost_steps": reached - first[1] + 1,
                }
            time.sleep(0.01)
        return {"outcome": f"not recovered within {patience:g} s"}

    def end(self) -> None:
        """The job and all its ranks: an agent that is killed leaves them behind."""
        all_of_it = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for left in all_of_it:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def torchrun(work: Path, environment: dict[str, str]) -> Watched:
    model, data = make_job(work)
    out, samples = work / "torchrun", work / "samples.safetensors"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if not samples.exists():
        samples.write_bytes(sample_file(read_samples(data, load_chat_assets(model), 512)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "10", str(ROOT / "scripts" / "tune" / "plain_ddp.py"),
        str(model), str(samples), str(out), str(STEPS),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = out / "log.jsonl"
    return Watched(
        process,
        lambda: {x["rank"]: x["pid"] for x in json_lines(log) if "pid" in x},
        log,
        lambda: [x["time"] for x in json_lines(log) if "pid" in x],
    )


def tune(work: Path, mode: str) -> Watched:
    out = work / "tune"
    shutil.rmtree(out, ignore_errors=True)
    run = Run(
        work, out, "--replicas", 2, "--steps", STEPS, "--save-every", SAVE_EVERY, "--elastic", mode
    )
    return Watched(
        run.start(),
        run.workers,
        out / "losses.jsonl",
        lambda: [event["time"] for event in run.events("restored")],
    )


def case(work: Path, way: str, rank: int, patience: float) -> dict[str, Any]:
    if way.startswith("torchrun"):
        watched = torchrun(work, UNSHARED if "not shared" in way else {})
    else:
        watched = tune(work, way.rpartition(" ")[2])
    try:
        return watched.kill_and_wait(rank, patience)
    finally:
        watched.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5, help="kills of each way, over all runs")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to recover in")
    parser.add_argument("--minutes", type=float, help="begin no case after so long")
    parser.add_argument("--work", type=Path, default=Path("compare-torchrun-work"))
    parser.add_argument("--results", type=Path, default=Path("compare-torchrun-results.jsonl"))
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    for number in range(asked.count):
        for way in WAYS:
            if sum(line["way"] == way for line in json_lines(asked.results)) > number:
                continue
            if time.monotonic() > end:
                return totals(json_lines(asked.results))
            found = case(asked.work.resolve(), way, number % 2, asked.patience)
            line = {"way": way, "rank": number % 2, "load": round(os.getloadavg()[0], 1), **found}
            with asked.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return totals(json_lines(asked.results))


def totals(lines: list[dict[str, Any]]) -> int:
    failed = 0
    for way in WAYS:
        mine = [line for line in lines if line["way"] == way]
        back = [line for line in mine if line["outcome"] == "recovered"]
        failed += way.startswith("tune") and len(back) < len(mine)
        spread = ""
        if back:
            seconds, lost = ([line[key] for line in back] for key in ("seconds", "lost_steps"))
            spread = (
                f"; kill to next step median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s; "
                f"steps lost {min(lost)} to {max(lost)}"
            )
        print(f"{way}: recovered {len(back)} of {len(mine)}{spread}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
