"""`tune` disturbed at random, as one JSON line a case; started again, it goes on to the counts asked for.

pause: a run of 2 replicas, one of them killed between steps, in a step or its collective, or stopped; once or twice.
resize: 3 replicas become 2, 1 and 3 again. writer: rank 0 killed while it writes a checkpoint. controller: the
controlling process killed at a random moment, then the same command again. Each ends with the undisturbed run's
adapter, no acknowledged step lost, no partial checkpoint and no process left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron.artifacts import digest_file, json_lines
from gemma_neuron.tuning.checkpoints import STEM
from scripts.result_file import add_result, read_results
from scripts.tune.tiny_job import Inside, Run

STEPS, SAVE_EVERY = 30, 5
WRITER_STEPS, RESIZE_STEPS = 40, 100
HANG_SECONDS = 4
BOUNDS = {"pause": 15.0, "resize": 5.0, "writer": 15.0}
"""Seconds from a fault to the next step."""


class Soak:
    """All cases of one working folder."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.wanted: dict[int, str] = {}

    def run(
        self,
        *flags: object,
        steps: int = STEPS,
        save_every: int = SAVE_EVERY,
        kind: type[Run] = Inside,
    ) -> Run:
        out = self.work / "adapter"
        shutil.rmtree(out, ignore_errors=True)
        return kind(self.work, out, "--steps", steps, "--save-every", save_every, *flags)

    def undisturbed(self, steps: int) -> str:
        """Digest of the adapter of a run of one replica that nobody disturbs."""
        if steps not in self.wanted:
            self.wanted[steps] = self.run(steps=steps).finish()["digest"]
        return self.wanted[steps]

    def pause(self, draw: random.Random) -> dict[str, Any]:
        self.undisturbed(STEPS)
        run = self.run("--replicas", 2, "--hang-after", HANG_SECONDS)
        process, done = run.start(), []
        for step in sorted(draw.sample(range(2, STEPS - 4), draw.choice([1, 1, 2]))):
            number = draw.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP])
            rank = draw.randrange(2)
            if wait_for(process, partial(reached, run, step=step)):
                time.sleep(draw.uniform(0.0, 0.08))
                done.append([rank, signal.Signals(number).name, send(run, rank, number)])
        return self.judge(run, process.pid, STEPS) | {"sent": done}

    def resize(self, draw: random.Random) -> dict[str, Any]:
        """The second replica is lost as soon as the run goes on without the first."""
        self.undisturbed(RESIZE_STEPS)
        flags = ("--replicas", 3, "--elastic", "resize", "--regrow-after", 2.0, "--max-failures", 2)
        run = self.run(*flags, steps=RESIZE_STEPS)
        process, step = run.start(), draw.randrange(3, 9)
        for lost, rank in enumerate(draw.sample(range(3), 2)):
            if wait_for(process, partial(reached, run, step=step, resumed=lost)):
                time.sleep(draw.uniform(0.0, 0.05))
                send(run, rank, signal.SIGKILL)
        line = self.judge(run, process.pid, RESIZE_STEPS)
        worlds = [event["replicas"] for event in run.events("resumed")]
        kinds = [event["kind"] for event in run.events("retry")]
        if worlds[:2] != [2, 1] or worlds[-1] != 3:
            line["problems"].append(f"went through {worlds} replicas")
        line["outcome"] = "; ".join(line["problems"]) or "ok"
        return line | {"worlds": worlds, "kinds": kinds}

    def writer(self, draw: random.Random) -> dict[str, Any]:
        """Rank 0 is killed as soon as a checkpoint's folder is there, or a moment later."""
        self.undisturbed(WRITER_STEPS)
        run = self.run("--replicas", 2, "--max-failures", 50, steps=WRITER_STEPS, save_every=4)
        process, killed = run.start(), 0
        for step in range(4, WRITER_STEPS - 4, 4):
            folder = run.out / "checkpoints" / f"step-{step:08d}"
            if wait_for(process, folder.exists, pause=0.0005):
                time.sleep(draw.choice([0.0, draw.uniform(0.0, 0.004)]))
                killed += send(run, 0, signal.SIGKILL)
                wait_for(process, partial(reached, run, resumed=killed))
        return counted(self.judge(run, process.pid, WRITER_STEPS), killed, [])

    def controller(self, draw: random.Random) -> dict[str, Any]:
        """Kills of the controller itself, up to eight in one run; nothing of it may stay.

        Most of them some steps into a life, since one that is killed while it loads the model commits nothing.
        """
        self.undisturbed(WRITER_STEPS)
        run = self.run("--replicas", 2, steps=WRITER_STEPS, save_every=2, kind=Run)
        killed, problems = 0, []
        for _ in range(8):
            lives, lines = len(run.events("restored")), run.lines()
            process, steps = run.start(), draw.choice([0, 1, 2, 3, 4, 5])
            began = wait_for(process, partial(lives_on, run, lives, lines + steps))
            time.sleep(draw.uniform(0.0, 0.15))
            if not began or process.poll() is not None:
                break
            acknowledged = max([e["step"] for e in run.events("committed")], default=0)
            process.kill()
            SENT.setdefault(str(run.out), []).append(time.time())
            process.communicate()
            killed, run.process = killed + 1, None
            time.sleep(0.3)
            if run.orphans():
                time.sleep(1.7)
                problems += [f"orphans {run.orphans()}"] if run.orphans() else []
            follow = self._followed(run)
            problems += [f"acknowledged {acknowledged}, newest {follow}"] * (follow < acknowledged)
        line = self.judge(run, run.start().pid if run.process is None else 0, WRITER_STEPS)
        return counted(line, killed, problems)

    @staticmethod
    def _followed(run: Run) -> int:
        """The newest step with a marker on disk."""
        markers = (run.out / "checkpoints").glob(f"step-*/{STEM}.committed")
        return max((int(path.parent.name.removeprefix("step-")) for path in markers), default=0)

    def judge(self, run: Run, pid: int, steps: int) -> dict[str, Any]:
        """Let it end, and hold what it leaves against the undisturbed run."""
        started = time.monotonic()
        problems = []
        try:
            answer = run.finish()
        except Exception as error:
            return {"outcome": f"{type(error).__name__}: {error}", "problems": [str(error)]}
        if digest_file(run.out / "adapter_model.safetensors") != self.wanted[steps]:
            problems.append("the adapter is another one")
        if pid and {event["pid"] for event in run.events("resumed")} - {pid}:
            problems.append("another controller")
        if run.orphans():
            problems.append(f"orphans {run.orphans()}")
        problems += went_back(run)
        folders = list((run.out / "checkpoints").iterdir())
        if any(not (folder / f"{STEM}.committed").exists() for folder in folders):
            problems.append("a partial checkpoint stays")
        return {
            "outcome": "; ".join(problems) or "ok",
            "problems": problems,
            "kill_to_step": [round(seconds, 3) for seconds in kill_to_step(run)],
            "lost_steps": answer["lost_steps"],
            "restarts": answer["restarts"],
            "seconds": round(time.monotonic() - started, 1),
        }


def counted(line: dict[str, Any], kills: int, problems: list[str]) -> dict[str, Any]:
    """A run's line with its kills and with what was seen of them; none at all is a problem too."""
    found = [*line["problems"], *problems, *["nothing was killed"] * (not kills)]
    return line | {"kills": kills, "problems": found, "outcome": "; ".join(found) or "ok"}


def went_back(run: Run) -> list[str]:
    """Restarts from before what had been acknowledged, over all lives of a run."""
    acknowledged, found = 0, []
    for event in run.events("committed", "restored"):
        if event["event"] == "committed":
            acknowledged = max(acknowledged, event["step"])
        elif event["step"] < acknowledged:
            found.append(f"restored {event['step']}, acknowledged {acknowledged}")
    return found


def kill_to_step(run: Run) -> list[float]:
    """From each signal, as noted beside the events, to the first step done after it.

    A run that lost replicas says itself when it goes on; one whose controller was lost writes its next step.
    """
    resumed = [e["time"] for e in run.events("resumed")]
    if not resumed:
        resumed = [line["time"] for line in json_lines(run.out / "losses.jsonl")]
    found = []
    for sent in SENT.pop(str(run.out), []):
        later = [moment for moment in resumed if moment > sent]
        found += [later[0] - sent] if later else []
    return found


SENT: dict[str, list[float]] = {}


def send(run: Run, rank: int, number: int) -> bool:
    """Send a signal to a rank's worker; whether it was there."""
    try:
        os.kill(run.workers()[rank], number)
    except (ProcessLookupError, KeyError):
        return False
    SENT.setdefault(str(run.out), []).append(time.time())
    return True


def reached(run: Run, *, step: int = 0, resumed: int = 0) -> bool:
    return run.step() >= step and len(run.events("resumed")) >= resumed


def lives_on(run: Run, lives: int, lines: int) -> bool:
    """Whether one more life than `lives` has begun, and its progress stands at `lines`."""
    return len(run.events("restored")) > lives and run.lines() >= lines


def wait_for(process: Any, holds: Callable[[], bool], pause: float = 0.01) -> bool:
    """Until `holds`; False when the process ends first."""
    while process.poll() is None:
        if holds():
            return True
        time.sleep(pause)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="disturbed runs of 2 replicas")
    parser.add_argument("--resizes", type=int, default=10, help="runs that go 3, 2, 1, 3")
    parser.add_argument("--writer", type=int, default=200, help="kills of the checkpoint writer")
    parser.add_argument("--controller", type=int, default=200, help="kills of the controller")
    parser.add_argument("--minutes", type=float, help="begin no case after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("soak-tune-work"))
    parser.add_argument("--results", type=Path, default=Path("soak-tune-results.jsonl"))
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    soak = Soak(asked.work.resolve())
    wanted = {
        "pause": asked.count,
        "resize": asked.resizes,
        "writer": asked.writer,
        "controller": asked.controller,
    }
    while time.monotonic() < end:
        done = read_results(asked.results)
        left = {kind: count - progress(done, kind) for kind, count in wanted.items()}
        kind = max(left, key=lambda name: left[name] / max(1, wanted[name]))
        if left[kind] <= 0:
            break
        number = sum(line["kind"] == kind for line in done)
        case = getattr(soak, kind)(random.Random(f"{asked.seed}-{kind}-{number}"))
        load = round(os.getloadavg()[0], 1)
        line = {"kind": kind, "number": number, "load": load, **case}
        add_result(asked.results, line)
        print(json.dumps(line), flush=True)
    shutil.rmtree(asked.work / "adapter", ignore_errors=True)
    return totals(read_results(asked.results))


def progress(lines: list[dict[str, Any]], kind: str) -> int:
    """Runs of a kind, or kills where those are counted; a run with none has failed, and counts."""
    return sum(max(1, line.get("kills", 1)) for line in lines if line["kind"] == kind)


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals a kind; 1 when a case failed or a bound was passed."""
    failed = 0
    for kind in ("pause", "resize", "writer", "controller"):
        mine = [line for line in lines if line["kind"] == kind]
        bad = [line for line in mine if line["outcome"] != "ok"]
        times = [seconds for line in mine for seconds in line.get("kill_to_step", [])]
        late = [seconds for seconds in times if seconds > BOUNDS.get(kind, float("inf"))]
        failed += len(bad) + len(late)
        spread = ""
        if times:
            middle, most = statistics.median(times), max(times)
            spread = f", signal to next step median {middle:.2f} s, at most {most:.2f} s"
        print(
            f"{kind}: {len(mine)} runs, {progress(lines, kind)} counted, {len(bad)} failed, {len(late)} late{spread}"
        )
        for line in bad:
            print(f"  FAILED {kind} {line['number']}: {line['outcome']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
