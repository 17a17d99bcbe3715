"""`shard` against `cp` and `sync` of files of the ranks' sizes, and against splitting the whole state dict in memory.

One run prints all: rounds of each, with their inputs in the page cache and with the page cache dropped, medians, peak
anonymous memory, and the ratio of `shard` (the whole command, digests and fsync included) to the copy. What each wrote
is deleted after its round. Each measurement is one JSON line of the result file; started again, what is there counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gemma_neuron.elastic.memory import tree  # noqa: E402
from scripts.result_file import add_result, read_results  # noqa: E402

BAR = 1.3
INSPECT_BAR_SECONDS = 2.0
MEMORY_BAR_BYTES = 2**30
POLL_SECONDS = 0.01
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
BLOCK_BYTES = 1 << 24
TITLES = {
    "copy": "cp --reflink=never --sparse=never, then sync",
    "shard": "gemma-neuron shard",
    "usual": "whole state dict, split in memory",
    "inspect": "gemma-neuron inspect",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", type=Path, default=Path("slice31"), help="made if not there")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; default: beside")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--results", type=Path, default=Path("bench-shard-results.jsonl"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--split", nargs=2, type=Path, help=argparse.SUPPRESS)  # source, out
    asked = parser.parse_args()
    # all commands are timed with their bytecode kept, as anybody's second run is
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if asked.split is not None:
        return split_in_memory(asked.split[0], asked.split[1], asked.tp)
    work = (asked.work or asked.slice.parent) / "bench-shard-work"
    need_slice(asked.slice)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    caches = ["warm", "dropped"] if may_drop_caches() else ["warm"]
    if len(caches) == 1:
        say(f"the page cache cannot be dropped ({DROP_CACHES} is not writable): warm runs only")
    try:
        bench = Bench(asked.slice, work, asked.tp, asked.results)
        for number in range(asked.rounds):
            for cache in caches:
                for what in asked.what:
                    bench.measure(what, cache, number)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report(read_results(asked.results), asked.json)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def need_slice(folder: Path) -> None:
    """Make the slice where it is not there yet."""
    if not folder.exists():
        say(f"making {folder}")
        subprocess.run([sys.executable, ROOT / "scripts/make_slice.py", folder], check=True)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gemma_neuron", *map(str, arguments)]


def may_drop_caches() -> bool:
    return os.access(DROP_CACHES, os.W_OK)


@dataclass(frozen=True, slots=True)
class Ran:
    """Wall-clock seconds; most memory seen, children's counted, in bytes: anonymous (with shared), and all resident."""

    seconds: float
    anonymous: int
    resident: int
    out: str


def run_measured(arguments: Sequence[str], then: Callable[[], None] | None = None) -> Ran:
    """Run to its end, `then` included in the time; CalledProcessError when it fails."""
    started = time.perf_counter()
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    anonymous = resident = 0
    while child.poll() is None:
        now = [memory_of(pid) for pid in tree([child.pid])]
        anonymous = max(anonymous, sum(m.get("RssAnon", 0) + m.get("RssShmem", 0) for m in now))
        resident = max(resident, sum(m.get("VmRSS", 0) for m in now))
        time.sleep(POLL_SECONDS)
    out, err = child.communicate()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, arguments, out, err[-2000:])
    if then is not None:
        then()
    return Ran(time.perf_counter() - started, anonymous, resident, out)


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by name out of /proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if value.endswith(" kB")
    }


class Bench:
    """Runs what is not in the result file yet."""

    def __init__(self, source: Path, work: Path, tp: int, results: Path) -> None:
        self.source, self.work = source.resolve(), work.resolve()
        self.tp, self.results = tp, results
        self.done = {(r["what"], r["cache"], r["round"]) for r in read_results(results)}
        self.ranks: list[Path] = []

    def measure(self, what: str, cache: str, number: int) -> None:
        if (what, cache, number) in self.done:
            return
        inputs = self._random_ranks() if what == "copy" else sorted(self.source.iterdir())
        os.sync()
        if may_drop_caches():
            DROP_CACHES.write_text("1\n")  # warm too: what else is there would push the inputs out
        if cache == "warm":
            for path in inputs:
                read_through(path)
            warm_program()
        ran = {"copy": self._copy, "shard": self._shard, "usual": self._usual}.get(
            what, self._inspect
        )()
        line = {
            "what": what,
            "cache": cache,
            "round": number,
            "seconds": round(ran.seconds, 3),
            "anonymous_peak_bytes": ran.anonymous,
            "resident_peak_bytes": ran.resident,
        }
        add_result(self.results, line)
        say(json.dumps(line))

    def _shard(self) -> Ran:
        out = self.work / "port"
        ran = run_measured(command("shard", self.source, "--out", out, "--tp", self.tp, "--json"))
        shutil.rmtree(out)
        return ran

    def _copy(self) -> Ran:
        out = self.work / "copied"
        out.mkdir()
        flags = ("--reflink=never", "--sparse=never")
        ran = run_measured(["cp", *flags, *map(str, self.ranks), str(out)], os.sync)
        shutil.rmtree(out)
        return ran

    def _usual(self) -> Ran:
        out = self.work / "split"
        out.mkdir()
        told = ("--tp", str(self.tp), "--split", str(self.source), str(out))
        ran = run_measured([sys.executable, __file__, *told], os.sync)
        shutil.rmtree(out)
        return ran

    def _inspect(self) -> Ran:
        return run_measured(command("inspect", self.source, "--json"))

    def _random_ranks(self) -> list[Path]:
        """Files of random data with the sizes of the rank files, made once."""
        if not self.ranks:
            folder = self.work / "random"
            folder.mkdir()
            say(f"random files of the ranks' sizes: {folder}")
            out = self.work / "sizes"
            run_measured(command("shard", self.source, "--out", out, "--tp", self.tp, "--json"))
            for rank in sorted(out.glob("weights/*.safetensors")):
                self.ranks.append(folder / rank.name)
                write_random(self.ranks[-1], rank.stat().st_size)
            shutil.rmtree(out)
        return self.ranks


def read_through(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        room = bytearray(BLOCK_BYTES)
        while file.readinto(room):
            pass


def warm_program() -> None:
    """Bring the command's own code and libraries into the page cache; they are inputs too."""
    subprocess.run([sys.executable, "-c", "import gemma_neuron.models.rotary"], check=True)
    subprocess.run(command("shard", "--help"), check=True, stdout=subprocess.DEVNULL)


def write_random(path: Path, size: int) -> None:
    import numpy as np

    rng = np.random.Generator(np.random.SFC64())
    with path.open("wb") as file:
        for offset in range(0, size, BLOCK_BYTES):
            file.write(rng.bytes(min(BLOCK_BYTES, size - offset)))


def split_in_memory(source: Path, out: Path, tp: int) -> int:
    """As the usual tools do: the whole state dict read, every rank's part of it made, then a file a rank."""
    from safetensors.torch import load_file, save_file

    from gemma_neuron.models.registry import read_geometry, read_parameter_table
    from gemma_neuron.sharding.planner import layout

    geometry = read_geometry(json.loads((source / "config.json").read_text()))
    table = read_parameter_table(geometry)
    state: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        state |= {table.local_name(name) or name: t for name, t in load_file(file).items()}
    plan = layout(geometry, table, tp, "auto", "bfloat16")
    ranks: list[dict[str, Any]] = [{} for _ in range(tp)]
    for p in plan.parameters:
        if p.derived:
            continue
        axis = {"columns": 1}.get(p.placement.kind, 0)
        parts = state[p.name].chunk(p.placement.parts, axis)
        for rank, held in enumerate(ranks):
            held[p.name] = parts[p.placement.part_of_rank(rank, tp)].clone()
    for rank, held in enumerate(ranks):
        save_file(held, out / f"rank-{rank:02d}.safetensors")
    return 0


def report(lines: list[dict[str, Any]], as_json: bool) -> int:
    """Medians, peaks and the ratios against their bars; 1 when a bar is not met."""
    found: dict[str, Any] = {"schema": 1, "bars": {"ratio": BAR, "inspect": INSPECT_BAR_SECONDS}}
    missed = False
    for cache in ("warm", "dropped"):
        medians: dict[str, float] = {}
        for what, title in TITLES.items():
            mine = [r for r in lines if r["what"] == what and r["cache"] == cache]
            if not mine:
                continue
            times = [r["seconds"] for r in mine]
            medians[what] = statistics.median(times)
            peak = max(r["anonymous_peak_bytes"] for r in mine)
            found.setdefault(cache, {})[what] = {
                "median_seconds": medians[what],
                "seconds": times,
                "anonymous_peak_bytes": peak,
            }
            missed |= what == "shard" and peak > MEMORY_BAR_BYTES
            missed |= what == "inspect" and medians[what] > INSPECT_BAR_SECONDS
            if not as_json:
                shown = " ".join(f"{t:.1f}" for t in times)
                print(
                    f"{cache:8s}{title:46s}{medians[what]:8.2f} s  ({shown})  "
                    f"{peak / 1e6:,.0f} MB anonymous"
                )
        if medians.get("copy") and medians.get("shard"):
            ratio = medians["shard"] / medians["copy"]
            found[cache]["ratio"] = round(ratio, 3)
            missed |= ratio > BAR
            if not as_json:
                print(f"{cache:8s}shard takes {ratio:.2f} times what the copy takes (bar {BAR})")
    if as_json:
        print(json.dumps(found, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
