"""Fault tests many times over, and mixed runs of units that allocate as told, as one JSON line a case.

A round runs each fault test once, in a fresh process. A mixed run draws units, what they take and what is predicted
of them, and holds the process tree's proportional size against the budget. Started again, the script goes on until
the rounds and runs are complete over all its starts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.result_file import read_results  # noqa: E402

FILES = (
    "tests/elastic/test_engine.py",
    "tests/elastic/test_manager.py",
    "tests/elastic/test_notice.py",
    "tests/compilation/test_schedule.py",
    "tests/compilation/test_memory.py",
)
OVER = 1.05
LONGEST_FILE_SECONDS = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="rounds of every test, over all runs")
    parser.add_argument("--mixed", type=int, default=100, help="mixed memory runs, over all runs")
    parser.add_argument("--budget-mib", type=int, default=4096)
    parser.add_argument("--minutes", type=float, help="stop beginning cases after so many")
    parser.add_argument(
        "--only", default="", help="test files and mixed runs whose name has this word"
    )
    parser.add_argument("--results", type=Path, default=Path("soak-faults-results.jsonl"))
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    done = {line["case"] for line in read_results(asked.results)}
    planned = [(f"{file} {n}", file) for n in range(asked.count) for file in FILES]
    planned += [(f"mixed {n}", "") for n in range(asked.mixed)]
    for case, file in planned:
        if case in done or asked.only not in case:
            continue
        if time.monotonic() > end:
            break
        lines = tests(file) if file else [mixed(random.Random(case), asked.budget_mib)]
        with asked.results.open("a") as results:
            results.writelines(json.dumps({"case": case} | line) + "\n" for line in lines)
        bad = [line for line in lines if line["outcome"] != "ok"]
        print(json.dumps({"case": case, "lines": len(lines), "not_ok": bad}), flush=True)
    return totals(read_results(asked.results))


def tests(file: str) -> list[dict[str, Any]]:
    """One run of a file's tests, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", file, "-q", f"--junitxml={report}"]
        try:
            subprocess.run(
                [*command, "-p", "no:cacheprovider"],
                cwd=ROOT,
                capture_output=True,
                timeout=LONGEST_FILE_SECONDS,
                check=False,
            )
            cases = list(ElementTree.parse(report).iter("testcase"))
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            return [{"name": file, "seconds": 0.0, "outcome": f"{type(error).__name__}: {error}"}]
    lines = []
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error")]
        skipped = any(part.tag == "skipped" for part in case)
        how = (bad[0].get("message") or "failed")[:400] if bad else "skipped" if skipped else "ok"
        name = f"{file}::{case.get('name')}"
        lines.append({"name": name, "seconds": float(case.get("time") or 0), "outcome": how})
    return lines


def mixed(chance: random.Random, budget_mib: int) -> dict[str, Any]:
    """Three to eight units, a tenth to seven tenths of the budget each, predicted from a third of that to half as
    much again."""
    from tests.compilation.test_memory import run

    units = {}
    for number in range(chance.randint(3, 8)):
        takes = int(budget_mib * chance.uniform(0.1, 0.7))
        predicted = int(takes * chance.uniform(0.33, 1.5))
        rate = int(budget_mib * chance.uniform(0.03, 0.12))
        units[f"unit{number}"] = [predicted, f"allocate {takes} {rate} {chance.uniform(0, 2):.2f}"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said, peak = run(Path(folder), units=units, budget=budget_mib)
    share = peak / (budget_mib << 20)
    problems = []
    if said["error"] is not None:
        problems.append(said["error"]["message"])
    if sorted(said["peaks"]) != sorted(units):
        problems.append(f"built: {sorted(said['peaks'])}")
    if share > OVER:
        problems.append(f"peak {share:.3f} of the budget")
    return {
        "name": "mixed",
        "units": len(units),
        "stopped": sum(event.startswith("stopped_for_memory") for event in said["events"]),
        "peak_share": round(share, 4),
        "seconds": round(time.monotonic() - started, 1),
        "outcome": "; ".join(problems) or "ok",
    }


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals a test from the result file; 1 when any case failed."""
    by_name = defaultdict(list)
    for line in lines:
        by_name[line["name"]].append(line)
    for name, mine in sorted(by_name.items()):
        counts = Counter(
            x["outcome"] if x["outcome"] in ("ok", "skipped") else "FAILED" for x in mine
        )
        slowest = max(line["seconds"] for line in mine)
        shown = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
        print(f"{name}: {shown}, slowest {slowest:.1f} s")
    shares = [line["peak_share"] for line in by_name["mixed"]]
    if shares:
        stopped = sum(line["stopped"] for line in by_name["mixed"])
        print(f"mixed: peak at most {max(shares):.3f} of the budget, {stopped} units stopped")
    return 1 if any(line["outcome"] not in ("ok", "skipped") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
