"""The job that the long runs disturb: a tiny random Gemma 4, some conversations, `tune` as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import json_lines
from gemma_neuron.pipeline.tuning import TuneRequest, tuned
from tests.tiny import write_tiny_gemma4

ROOT = Path(__file__).parents[2]
LAYERS, TALKS, BATCH = 3, 24, 6
MOST_SECONDS = 600


def make_job(work: Path) -> tuple[Path, Path]:
    """Model folder and data file, made once."""
    model, data = work / "model", work / "chats.jsonl"
    if not data.exists():
        shutil.rmtree(model, ignore_errors=True)
        write_tiny_gemma4(model, layers=LAYERS)
        lines = []
        for number in range(TALKS):
            said = [f"What is {number} and {number}?", f"It is {2 * number}." * (1 + number % 3)]
            talk = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), said, strict=True)
            ]
            lines.append(json.dumps({"messages": talk}))
        data.write_text("\n".join(lines) + "\n")
    return model, data


class Run:
    """One `tune` process in `out`. Its answer, events and adapter are read from what it leaves."""

    def __init__(self, work: Path, out: Path, *flags: object) -> None:
        model, data = make_job(work)
        self.out = out
        arguments = ["tune", model, "--data", data, "--out", out, "--batch", BATCH, "--threads", 1]
        self.command = [
            sys.executable, "-m", "gemma_neuron", *map(str, [*arguments, *flags]), "--json",
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def finish(self) -> dict[str, Any]:
        """The answer of the process that was started, or of one started now. Raises RuntimeError."""
        process = self.process or self.start()
        out, err = process.communicate(timeout=MOST_SECONDS)
        self.process = None
        if process.returncode:
            raise RuntimeError(f"exit {process.returncode}: {err[-600:]}")
        answer: dict[str, Any] = json.loads(out)
        return answer

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in json_lines(self.out / "events.jsonl") if e["event"] in names]

    def workers(self) -> dict[int, int]:
        """Rank → process of its last worker."""
        return {e["rank"]: e["worker_pid"] for e in self.events("worker_started")}

    def step(self) -> int:
        """The last step that was done."""
        lines = json_lines(self.out / "losses.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    def lines(self) -> int:
        """How many steps were done, those done again counted again."""
        return len(json_lines(self.out / "losses.jsonl"))

    def orphans(self) -> list[int]:
        """Workers of this run that are still there."""
        import psutil

        found = []
        for event in self.events("worker_started"):
            try:
                process = psutil.Process(event["worker_pid"])
                born_in_this_run = process.create_time() > event["time"] - 60
                if process.status() != psutil.STATUS_ZOMBIE and born_in_this_run:
                    found.append(event["worker_pid"])
            except psutil.NoSuchProcess:
                continue
        return found


class Inside(Run):
    """The same run with this process as its controller: what imports cost is paid once for many runs."""

    def __init__(self, work: Path, out: Path, *flags: object) -> None:
        super().__init__(work, out, *flags)
        model, data = make_job(work)
        names = (str(flag).removeprefix("--").replace("-", "_") for flag in flags[::2])
        asked: dict[str, Any] = dict(zip(names, flags[1::2], strict=True))
        self.model = model
        self.request = TuneRequest(data=data, out=out, batch=BATCH, threads=1, **asked)
        self.controller: Controller | None = None

    def start(self) -> Any:
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        self.controller = Controller(self.model, self.request)
        self.controller.thread.start()
        return self.controller

    def finish(self) -> dict[str, Any]:
        controller = self.controller or self.start()
        controller.thread.join(MOST_SECONDS)
        self.controller = None
        if controller.error is not None:
            raise controller.error
        if controller.answer is None:
            raise TimeoutError(f"not done after {MOST_SECONDS} s")
        answer: dict[str, Any] = controller.answer
        return answer


class Controller:
    """A thread of this process that trains; `poll` and `pid` are what a process has."""

    def __init__(self, model: Path, request: TuneRequest) -> None:
        self.pid = os.getpid()
        self.answer: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(str(model), request), daemon=True)

    def _run(self, model: str, request: TuneRequest) -> None:
        try:
            self.answer = tuned(model, request, notice=lambda line: None).to_json()
        except Exception as error:
            self.error = error

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 0
