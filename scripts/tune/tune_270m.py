"""Real weights: 50 steps of Gemma 3 270M in peace, and with a replica killed twice; the curves must be the same.

The text is `pydoc_data.topics`, the reference that every Python has for `help()`, cut to pieces of some words.
Started again, it keeps the runs that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gemma_neuron.artifacts import append_json_line, json_lines

ROOT = Path(__file__).parents[2]
SAMPLES, SAVE_EVERY, REPLICAS = 80, 10, 2
KILLS = ((0, 0.26), (1, 0.62))
"""Rank, and the share of the steps after which it is killed, while the next one is computed."""

INTO_STEP_SECONDS = 0.3


def write_text(path: Path, words: int) -> None:
    """Pieces of `words` words, one a line."""
    all_words = " ".join(topics[name] for name in sorted(topics)).split()
    pieces = (" ".join(all_words[at : at + words]) for at in range(0, len(all_words), words))
    lines = [json.dumps({"text": piece}) for piece, _ in zip(pieces, range(SAMPLES), strict=False)]
    path.write_text("\n".join(lines) + "\n")


class Training:
    """One run of `tune`, watched by what it writes."""

    def __init__(self, model: Path, data: Path, out: Path, steps: int, batch: int) -> None:
        self.out = out
        self.command = [
            sys.executable, "-m", "gemma_neuron", "tune", model, "--data", data, "--out", out,
            "--steps", steps, "--batch", batch, "--replicas", REPLICAS, "--threads", 1,
            "--save-every", SAVE_EVERY, "--report", out.with_suffix(".html"), "--json",
        ]  # fmt: skip

    def run(self, kills: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        """Its answer. `kills`: rank, and the step after which it is killed. Raises SystemExit when it fails."""
        shutil.rmtree(self.out, ignore_errors=True)
        started = time.monotonic()
        process = subprocess.Popen(list(map(str, self.command)), cwd=ROOT, stdout=subprocess.PIPE)
        for rank, step in kills:
            while process.poll() is None and max(self.losses(), default=0) < step:
                time.sleep(0.05)
            time.sleep(INTO_STEP_SECONDS)
            if process.poll() is None:
                os.kill(self.workers()[rank], signal.SIGKILL)
        text = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"tune ended with {process.returncode}")
        answer: dict[str, Any] = json.loads(text)
        return answer | {"seconds": round(time.monotonic() - started, 1)}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in json_lines(self.out / "events.jsonl") if e["event"] == name]

    def workers(self) -> dict[int, int]:
        """Rank → process of its last worker."""
        return {e["rank"]: e["worker_pid"] for e in self.events("worker_started")}

    def losses(self) -> dict[int, set[float]]:
        """Step → its loss; more than one where a step done again gave another."""
        found: dict[int, set[float]] = {}
        for line in json_lines(self.out / "losses.jsonl"):
            found.setdefault(line["step"], set()).add(line["loss"])
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="scripts/fetch-gemma3-270m")
    parser.add_argument("--work", type=Path, default=Path("tune-270m-work"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=40, help="words a sample")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    work, job = (
        asked.work.resolve(),
        {key: vars(asked)[key] for key in ("steps", "batch", "length")},
    )
    write_text(work / "text.jsonl", asked.length)
    kills = tuple((rank, round(share * asked.steps)) for rank, share in KILLS)
    runs, answers = {}, {}
    for name in ("peace", "kills"):
        runs[name] = Training(
            asked.model.resolve(), work / "text.jsonl", work / name, asked.steps, asked.batch
        )
        found = [
            line for line in json_lines(work / "runs.jsonl") if {**line, "run": name, **job} == line
        ]
        if not found:
            answer = runs[name].run(kills if name == "kills" else ())
            load = round(os.getloadavg()[0], 1)
            found = [{"run": name, **job, "load": load, **answer}]
            append_json_line(work / "runs.jsonl", found[0])
            print(json.dumps(found[0]), flush=True)
        answers[name] = found[-1]
    curve, resumed = runs["peace"].losses(), runs["kills"].events("resumed")
    result = {
        "curves_equal": curve == runs["kills"].losses(),
        "adapters_equal": answers["peace"]["digest"] == answers["kills"]["digest"],
        "kills": len(resumed),
        "loss": [next(iter(curve[step])) for step in (1, asked.steps)],
        "downtime_seconds": [event["downtime_seconds"] for event in resumed],
        "lost_steps": [event["lost_steps"] for event in resumed],
        "peak_bytes": max(answer["peak_bytes"] for answer in answers.values()),
    }
    print(json.dumps(result))
    good = result["curves_equal"] and result["adapters_equal"] and len(resumed) == len(kills)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
