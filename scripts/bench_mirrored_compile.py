"""The wall time of one compile with and without a mirror, in pairs whose order alternates, in one run.

Both commands begin with an empty folder; the mirrored one ends when everything is in the bucket, so its last wait is in
its time. The server runs on the same cores and is no part of the product: its CPU seconds stand in their own column.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron.chat import load_chat_assets
from scripts.result_file import add_result, read_results
from tests.sources.processes import Commands, clean_environment
from tests.sources.rclone_server import RcloneServer, rclone
from tests.sources.s3_servers import KEYS

BUCKET = "bench"
MOST_COST = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--count", type=int, default=3, help="pairs, over all runs")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--results", type=Path, default=Path("bench-mirrored-compile-results.jsonl")
    )
    asked = parser.parse_args()
    base = [] if load_chat_assets(asked.source).template else ["--base"]
    deadline = time.monotonic() + 60 * asked.minutes
    for number in range(len(read_results(asked.results)), asked.count):
        if time.monotonic() > deadline:
            break
        line = pair(number, [asked.source, "--tp", asked.tp, "--backend", "cpu", *base])
        add_result(asked.results, line)
        print(json.dumps(line), flush=True)
    return judged(read_results(asked.results))


def pair(number: int, compile_: list[Any]) -> dict[str, Any]:
    """Seconds of both sides; even pairs begin without the mirror, odd ones with it."""
    with tempfile.TemporaryDirectory() as name, rclone(Path(name) / "store", BUCKET) as server:
        folder = Path(name)
        commands = Commands(clean_environment() | KEYS).having(
            AWS_ENDPOINT_URL_S3=server.address, AWS_EC2_METADATA_DISABLED="true"
        )
        line: dict[str, Any] = {"pair": number}
        for side in ("alone", "mirrored")[:: 1 if number % 2 == 0 else -1]:
            mirror = ["--mirror", f"s3://{BUCKET}/port"] if side == "mirrored" else []
            before, started = server_cpu(server), time.monotonic()
            run(commands, "compile", *compile_, "--out", folder / side, *mirror)
            line[f"{side}_seconds"] = round(time.monotonic() - started, 2)
            if mirror:
                line["server_cpu_seconds"] = round(server_cpu(server) - before, 2)
                stored = (path for path in (folder / "store").rglob("*") if path.is_file())
                line["stored_bytes"] = sum(path.stat().st_size for path in stored)
            shutil.rmtree(folder / side)
    return line


def run(commands: Commands, *arguments: object) -> None:
    process = commands.start(*arguments)
    _, told = process.communicate()
    if process.returncode != 0:
        sys.exit(f"error: compile ended with {process.returncode}: {told.strip()[-800:]}")


def server_cpu(server: RcloneServer) -> float:
    """CPU seconds of the server so far."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def judged(lines: list[dict[str, Any]]) -> int:
    if not lines:
        print("nothing was measured")
        return 1
    costs = sorted(line["mirrored_seconds"] / line["alone_seconds"] - 1 for line in lines)
    cost = statistics.median(costs)
    alone, mirrored, server = (
        statistics.median(line[f"{name}_seconds"] for line in lines)
        for name in ("alone", "mirrored", "server_cpu")
    )
    print(
        f"{len(lines)} pairs: alone {alone:.1f} s, mirrored {mirrored:.1f} s (medians), "
        f"cost {100 * cost:.1f} % (median of pairs; {100 * costs[0]:.1f} to {100 * costs[-1]:.1f}; "
        f"bar {100 * MOST_COST:.0f}); the server's own CPU {server:.1f} s"
    )
    return 0 if cost <= MOST_COST else 1


if __name__ == "__main__":
    sys.exit(main())
