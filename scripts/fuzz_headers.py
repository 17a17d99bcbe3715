"""Long fuzz of what is read before a checkpoint is trusted: no crash, no hang, no memory beyond the input's size.

The targets and their bounds are those of tests/fuzz. Each slice of a target is a process of its own, with its address
space limited, and ends in one JSON line of the result file: cases, slowest case, largest allocation, outcomes. A case
that breaks a bound is kept in the line as hex. Started again, it goes on until the minutes (or cases) are reached over
all runs; atheris' corpus stands in a folder beside the result file and grows.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.result_file import add_result, read_results  # noqa: E402

MEMORY_BYTES = 1 << 30
"""Address space a slice may take beyond what Python and the fuzzer hold when it begins."""
HANG_SECONDS = 60
"""Processor time of one case at which it is stopped; its bound is in tests.fuzz.targets."""
BLOCKED_SECONDS = 900
"""Wall clock of one case: one that waits for something takes no processor time. Generous, since a loaded machine
may leave a case without a processor for minutes."""
LONGEST_INPUT = 1 << 16
SLICES = 4
"""Of each target, so that a run cut short has seen them all."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--count", type=int, help="stop after so many cases, over all runs")
    parser.add_argument("--results", type=Path, default=Path("fuzz-headers-results.jsonl"))
    parser.add_argument("--engine", choices=("atheris", "hypothesis"))
    parser.add_argument("--target", action="append")
    parser.add_argument("--slice", nargs=4, help=argparse.SUPPRESS)  # target, seconds, cases, stats
    asked = parser.parse_args()
    engine = asked.engine or default_engine()
    if asked.slice is not None:
        name, seconds, cases, stats = asked.slice
        return run_slice(engine, Slice(name, float(seconds), int(cases), Path(stats)))
    from tests.fuzz.targets import TARGETS

    targets = asked.target or list(TARGETS)
    longest = min(60.0, max(3.0, asked.minutes * 60 / (SLICES * len(targets))))
    while True:
        mine = [line for line in read_results(asked.results) if line["target"] in targets]
        seconds = asked.minutes * 60 - sum(line["seconds"] for line in mine)
        cases = (asked.count or 10**12) - sum(line["cases"] for line in mine)
        if seconds <= 0 or cases <= 0:
            break
        done = {name: sum(x["seconds"] for x in mine if x["target"] == name) for name in targets}
        name = min(targets, key=lambda target: done[target])
        line = one_slice(engine, name, min(longest, seconds), cases, asked.results)
        add_result(asked.results, line)
        print(json.dumps(line | {"outcomes": len(line["outcomes"])}), flush=True)
        if line["outcome"] != "ok":
            break  # the same fault would be found again and again
    return totals(read_results(asked.results))


def default_engine() -> str:
    """Atheris, or hypothesis where it has no wheel; said, since the two are not the same."""
    try:
        import atheris  # noqa: F401
    except ImportError as error:
        print(f"engine: hypothesis (atheris is not usable here: {error})", file=sys.stderr)
        return "hypothesis"
    return "atheris"


@dataclass(frozen=True, slots=True)
class Slice:
    """What a child process is told: at most so many seconds and cases of one target, counts to `stats`."""

    name: str
    seconds: float
    cases: int
    stats: Path


def one_slice(engine: str, name: str, seconds: float, cases: int, results: Path) -> dict[str, Any]:
    """A child process for so many seconds; what it counted, and how it ended."""
    corpus = results.with_suffix(".corpus") / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        told = map(str, (name, seconds, cases, stats))
        command = [sys.executable, __file__, "--engine", engine, "--slice", *told]
        started = time.monotonic()
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "FUZZ_CORPUS": str(corpus.absolute())},
        )
        counted = json.loads(stats.read_text()) if stats.exists() else {}
    line = {
        "target": name,
        "engine": engine,
        "cases": 0,
        "slowest_seconds": 0.0,
        "largest_allocation": 0,
        "outcomes": {},
        "outcome": "ok",
        **counted,
        "seconds": round(time.monotonic() - started, 1),
    }
    if child.returncode != 0 and line["outcome"] == "ok":
        line |= {"outcome": f"exit {child.returncode}", "error": child.stderr[-2000:]}
    return line


class Counting:
    """Runs cases, counts what came of them, and writes both to the stats file now and then."""

    def __init__(self, told: Slice) -> None:
        self.name, self.stats = told.name, told.stats
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.outcomes: Counter[str] = Counter()
        self.cases, self.slowest, self.largest, self.written = 0, 0.0, 0, 0.0

    def __call__(self, data: bytes) -> None:
        from tests.fuzz.targets import watched

        signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
        signal.alarm(BLOCKED_SECONDS)
        try:
            seen = watched(self.name, self.folder, data)
        except BaseException:
            self.write(
                {"outcome": "broken", "input": data.hex(), "error": traceback.format_exc()[-2000:]}
            )
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        self.cases += 1
        self.outcomes[seen.outcome] += 1
        self.slowest, self.largest = (
            max(self.slowest, seen.seconds),
            max(self.largest, seen.allocated),
        )
        if time.monotonic() - self.written > 1.0:
            self.write()

    def write(self, more: dict[str, Any] | None = None) -> None:
        self.written = time.monotonic()
        fields = {
            "cases": self.cases,
            "slowest_seconds": round(self.slowest, 4),
            "largest_allocation": self.largest,
            "outcomes": dict(self.outcomes.most_common(40)),
            **(more or {}),
        }
        self.stats.write_text(json.dumps(fields))


def run_slice(engine: str, told: Slice) -> int:
    """In the child: set the limits, then fuzz."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"one case took {HANG_SECONDS} s of work, or {BLOCKED_SECONDS} s in all")

    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)
    return (with_atheris if engine == "atheris" else with_hypothesis)(told)


def with_hypothesis(told: Slice) -> int:
    """Rounds of hypothesis' own search, each with another seed, its target() drawn to large allocations."""
    from hypothesis import HealthCheck, given, seed, settings, target

    from tests.fuzz.strategies import BYTES
    from tests.fuzz.targets import limit_memory

    limit_memory(MEMORY_BYTES)
    counting, deadline = Counting(told), time.monotonic() + told.seconds
    while time.monotonic() < deadline and counting.cases < told.cases:

        @seed(int.from_bytes(os.urandom(8), "big"))
        @settings(
            max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(BYTES[told.name])
        def fuzz(data: bytes) -> None:
            if time.monotonic() < deadline and counting.cases < told.cases:
                counting(data)
                target(float(len(counting.outcomes)))

        fuzz()
    counting.write()
    return 0


def with_atheris(told: Slice) -> int:
    """Coverage-guided: half of the inputs as bytes for the target, half as choices of its hypothesis strategy."""
    import atheris

    with atheris.instrument_imports(include=["gemma_neuron.checkpoint", "gemma_neuron.models"]):
        from tests.fuzz.targets import limit_memory, seeds
    from hypothesis import HealthCheck, given, settings

    from tests.fuzz.strategies import BYTES

    counting = Counting(told)
    corpus = Path(os.environ["FUZZ_CORPUS"])
    for number, data in enumerate(seeds(told.name, counting.folder)):
        (corpus / f"seed-{number}").write_bytes(b"\0" + data)

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(BYTES[told.name])
    def structured(data: bytes) -> None:
        counting(data)

    def one(data: bytes) -> None:
        if data[:1] > b"\x7f":
            structured.hypothesis.fuzz_one_input(data[1:])
        else:
            counting(data[1:])

    limit_memory(MEMORY_BYTES)
    flags = [
        f"-max_total_time={max(1, round(told.seconds))}",
        f"-max_len={LONGEST_INPUT}",
        f"-timeout={2 * BLOCKED_SECONDS}",
        f"-artifact_prefix={counting.folder}/",
        f"-atheris_runs={told.cases}",
        "-rss_limit_mb=0",  # the address space is limited above, and tracemalloc counts each case
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *flags], one)
    atexit.register(counting.write)
    atheris.Fuzz()
    return 0


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals a target from the result file; 1 when any slice ended otherwise than ok."""
    for name in sorted({line["target"] for line in lines}):
        mine = [line for line in lines if line["target"] == name]
        outcomes = {outcome for line in mine for outcome in line["outcomes"]}
        engines = ", ".join(sorted({line["engine"] for line in mine}))
        print(
            f"{name}: {sum(x['cases'] for x in mine):,} cases in {sum(x['seconds'] for x in mine):.0f} s "
            f"({engines}), {len(outcomes)} outcomes, slowest {max(x['slowest_seconds'] for x in mine):.3f} s, "
            f"largest allocation {max(x['largest_allocation'] for x in mine):,} bytes, "
            f"{sum(x['outcome'] != 'ok' for x in mine)} broken"
        )
    broken = [line for line in lines if line["outcome"] != "ok"]
    for line in broken:
        print(f"BROKEN {line['target']}: {line['outcome']}: {line.get('error', '')[-600:]}")
    cases, seconds = (sum(line[key] for line in lines) for key in ("cases", "seconds"))
    print(f"total: {cases:,} cases in {seconds / 60:.1f} minutes, {len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
