"""Real weights: 50 steps of Gemma 3 270M in peace, and with a replica killed twice; the curves must be the same.

The text is `pydoc_data.topics`, the reference that every Python has for `help()`, cut to pieces of some words.
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

from gemma_neuron.artifacts import json_lines

ROOT = Path(__file__).parents[2]
BATCH, SAMPLES, SAVE_EVERY, REPLICAS = 4, 80, 10, 2
KILLS = ((0, 13), (1, 31))
"""Rank, and the step after which it is killed, while the next is computed."""


def write_text(path: Path, words: int) -> None:
    """Pieces of `words` words, one a line."""
    all_words = " ".join(topics[name] for name in sorted(topics)).split()
    pieces = (" ".join(all_words[at : at + words]) for at in range(0, len(all_words), words))
    lines = [json.dumps({"text": piece}) for piece, _ in zip(pieces, range(SAMPLES), strict=False)]
    path.write_text("\n".join(lines) + "\n")


class Training:
    """One run of `tune`, watched by what it writes."""

    def __init__(self, model: Path, data: Path, out: Path, steps: int) -> None:
        self.out = out
        self.command = [
            sys.executable, "-m", "gemma_neuron", "tune", model, "--data", data, "--out", out,
            "--steps", steps, "--batch", BATCH, "--replicas", REPLICAS, "--threads", 1,
            "--save-every", SAVE_EVERY, "--report", out.with_suffix(".html"), "--json",
        ]  # fmt: skip

    def run(self, kills: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        shutil.rmtree(self.out, ignore_errors=True)
        started = time.monotonic()
        process = subprocess.Popen(list(map(str, self.command)), cwd=ROOT, stdout=subprocess.PIPE)
        for rank, step in kills:
            while process.poll() is None and max(self.losses(), default=0) < step:
                time.sleep(0.05)
            time.sleep(0.3)
            workers = {
                e["rank"]: e["worker_pid"] for e in self.events() if e["event"] == "worker_started"
            }
            os.kill(workers[rank], signal.SIGKILL)
        text = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"tune ended with {process.returncode}")
        answer: dict[str, Any] = json.loads(text)
        return answer | {"seconds": round(time.monotonic() - started, 1)}

    def events(self) -> list[dict[str, Any]]:
        return json_lines(self.out / "events.jsonl")

    def losses(self) -> dict[int, float]:
        lines = json_lines(self.out / "losses.jsonl")
        return {line["step"]: line["loss"] for line in lines if "step" in line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="scripts/fetch-gemma3-270m")
    parser.add_argument("--work", type=Path, default=Path("tune-270m-work"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=40, help="words a sample")
    asked = parser.parse_args()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_text(work / "text.jsonl", asked.length)
    runs = {}
    for name, kills in (("peace", ()), ("kills", KILLS)):
        training = Training(asked.model.resolve(), work / "text.jsonl", work / name, asked.steps)
        answer = training.run(kills)
        runs[name] = (answer, training.losses())
        print(json.dumps({"run": name, "load": round(os.getloadavg()[0], 1), **answer}), flush=True)
    (peace, curve), (kills_, other) = runs["peace"], runs["kills"]
    events = json_lines(work / "kills" / "events.jsonl")
    down = [event["downtime_seconds"] for event in events if event["event"] == "resumed"]
    result = {
        "curves_equal": curve == other,
        "adapters_equal": peace["digest"] == kills_["digest"],
        "loss": [curve[1], curve[asked.steps]],
        "downtime_seconds": down,
        "peak_bytes": max(peace["peak_bytes"], kills_["peak_bytes"]),
    }
    print(json.dumps(result))
    return 0 if result["curves_equal"] and result["adapters_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
