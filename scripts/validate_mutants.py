"""Mutation score of the validator: single faults in a port, each judged by every level.

The port is cut and committed as `shard` does it and its graphs run uncompiled: a fault in a graph changes one line of
the model code for one case. Each case is one JSON line of the result file; started again, the run goes on with what is
missing there. The matrix is printed from the file: a column a level, and what plain token match on one short prompt
would have said. `--clean N` adds N runs without a fault, which must not be failed by anything. Exit 1 below the bars.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gemma_neuron.chat import load_chat_assets  # noqa: E402
from gemma_neuron.port import Port  # noqa: E402
from scripts.mutants import graph_faults, prompt_faults, weight_faults  # noqa: E402, F401
from scripts.mutants.base import FAULTS, Fault  # noqa: E402
from scripts.mutants.run import judged  # noqa: E402
from tests.eager import eager_port  # noqa: E402

CLEAN = "none"
LEVELS = "0123456"
BAR, BAR_3_TO_6 = 0.95, 0.90


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "gemma_neuron/data/demo-model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument("--clean", type=int, default=1)
    parser.add_argument("--count", type=int, help="at most so many cases in this run")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=Path("validate-mutants-results.jsonl"))
    parser.add_argument("--fault", default="", help="only faults whose name has this in it")
    asked = parser.parse_args()
    deadline = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        base = eager_port(
            asked.model,
            Path(folder) / "base",
            tp=asked.tp,
            base=load_chat_assets(asked.model).template is None,
            slots=4,
            max_context=asked.max_context,
            buckets=(128, 512),
            score_length=128,
        )
        todo = wanted(base, asked)
        for number, (name, fault) in enumerate(todo):
            if time.monotonic() > deadline or (asked.count is not None and number >= asked.count):
                break
            line = case(base.path, Path(folder) / "mutant", name, fault, asked)
            with asked.results.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(row(line), flush=True)
    return totals([x for x in read(asked.results) if x["model"] == asked.model.name])


def wanted(base: Port, asked: argparse.Namespace) -> list[tuple[str, Fault | None]]:
    """What is not in the result file yet, clean runs first."""
    done = [x["fault"] for x in read(asked.results) if x["model"] == asked.model.name]
    family, chat = base.geometry.family, bool(base.record.fingerprints.template)
    todo: list[tuple[str, Fault | None]] = [(CLEAN, None)] * (asked.clean - done.count(CLEAN))
    for name, fault in FAULTS.items():
        fits = family in fault.families and (chat or fault.kind != "prompt")
        if fits and name not in done and asked.fault in name:
            todo.append((name, fault))
    return todo


def case(
    base: Path, work: Path, name: str, fault: Fault | None, asked: argparse.Namespace
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "model": asked.model.name,
        "fault": name,
        "kind": "clean" if fault is None else fault.kind,
    }
    try:
        line |= judged(base, work, fault, asked.model)
        if fault is None:
            keep_golden(work, base)
    except Exception as error:
        line["crash"] = f"{type(error).__name__}: {error}"[:300]
    return line


def keep_golden(done: Path, base: Path) -> None:
    """The reference is made once: later cases ask the same prompts."""
    for file in (done / "golden").iterdir():
        (base / "golden").mkdir(exist_ok=True)
        (base / "golden" / file.name).write_bytes(file.read_bytes())


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(line: dict[str, Any]) -> str:
    if "crash" in line:
        return f"{line['fault'][:52]:52} CRASH {line['crash'][:60]}"
    marks = {"fail": "X", "pass": ".", "not-run": "-", "not-applicable": " "}
    cells = " ".join(marks[line["levels"][level]] for level in LEVELS)
    tokens = "no" if line["token_match"] else "yes"
    return f"{line['fault'][:52]:52} {cells}   {tokens:5} {line['verdict']}"


def totals(lines: list[dict[str, Any]]) -> int:
    """The matrix and the score. A crash counts as not caught."""
    print(f"{'fault':52} {' '.join(LEVELS)}   token  verdict")
    for line in sorted(lines, key=lambda x: (x["kind"], x["fault"])):
        print(row(line))
    clean = [x for x in lines if x["kind"] == "clean"]
    faulty = [x for x in lines if x["kind"] != "clean"]
    alarms = sum("crash" in x or "fail" in x["levels"].values() for x in clean)
    caught = sum(any_of(x, LEVELS) for x in faulty)
    late = sum(any_of(x, "3456") for x in faulty)
    tokens = sum("crash" not in x and not x["token_match"] for x in faulty)
    count = max(1, len(faulty))
    print(f"{len(clean)} clean runs, {alarms} false alarms")
    for text, found, bar in (
        ("by any level", caught, BAR),
        ("by levels 3 to 6 alone", late, BAR_3_TO_6),
    ):
        print(f"{found} of {len(faulty)} caught {text}: {found / count:.0%} (bar {bar:.0%})")
    print(
        f"{tokens} of {len(faulty)} caught by token match on one short prompt: {tokens / count:.0%}"
    )
    for level in LEVELS:
        only = [
            x["fault"]
            for x in faulty
            if any_of(x, level) and not any_of(x, LEVELS.replace(level, ""))
        ]
        print(f"level {level}: the only one for {len(only)}{': ' if only else ''}{'; '.join(only)}")
    return int(alarms > 0 or caught / count < BAR or late / count < BAR_3_TO_6)


def any_of(line: dict[str, Any], levels: str) -> bool:
    return "crash" not in line and any(line["levels"][level] == "fail" for level in levels)


if __name__ == "__main__":
    sys.exit(main())
