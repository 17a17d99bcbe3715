"""The mirror's upload of one large file against s5cmd's, to the same S3 server on loopback.

Each round sends the file once by each, in turn, as a process of its own; the median rates and their ratio are printed,
with the bar they are held to, and the largest anonymous memory of our process. Exit 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sources.rclone_server import rclone
from tests.sources.s3_servers import KEYS

BUCKET = "bench"
LEAST_RATIO = 0.9
MOST_MEMORY = 200_000_000
OURS = """
import sys
from pathlib import Path
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.parts import upload
from gemma_neuron.mirror.store import Store
store = Store(S3Location.parse(sys.argv[1]))
upload(store, sys.argv[2], Path(sys.argv[3]), lambda _: None, lambda: None)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=2_000_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, rclone(Path(folder) / "store", BUCKET) as server:
        file = random_file(Path(folder) / "large", asked.bytes)
        own = {"AWS_ENDPOINT_URL_S3": server.address, "AWS_EC2_METADATA_DISABLED": "true"}
        os.environ |= KEYS | own
        lines = []
        for number in range(asked.rounds):
            for name, command in sides(server.address, file, number).items():
                seconds, memory = timed(command)
                line = {
                    "round": number,
                    "side": name,
                    "seconds": round(seconds, 2),
                    "bytes_per_second": round(asked.bytes / seconds),
                    "anonymous_bytes": memory,
                }
                lines.append(line)
                print(json.dumps(line), flush=True)
                if asked.results is not None:
                    with asked.results.open("a") as out:
                        out.write(json.dumps(line) + "\n")
                shutil.rmtree(Path(folder) / "store" / BUCKET)
                (Path(folder) / "store" / BUCKET).mkdir()
    return judged(lines)


def sides(address: str, file: Path, number: int) -> dict[str, list[str]]:
    s5cmd = [program("s5cmd"), "--endpoint-url", address, "cp", str(file), f"s3://{BUCKET}/theirs"]
    return {
        "ours": [sys.executable, "-c", OURS, f"s3://{BUCKET}/raw", f"file-{number}", str(file)],
        "s5cmd": s5cmd,
    }


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        sys.exit(f"error: {name} is not installed\nhint: pip install '.[bench]'")
    return found


def random_file(path: Path, size: int) -> Path:
    piece = 16 * 1024 * 1024
    with path.open("wb") as file:
        for start in range(0, size, piece):
            file.write(os.urandom(min(piece, size - start)))
    return path


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds, and the most anonymous memory seen in samples 20 ms apart."""
    started = time.monotonic()
    process = psutil.Popen(command)
    most = 0
    while process.poll() is None:
        try:
            found = process.memory_info()
            most = max(most, found.rss - found.shared)
        except psutil.Error:
            pass
        time.sleep(0.02)
    if process.returncode != 0:
        sys.exit(f"error: {command[0]} ended with {process.returncode}")
    return time.monotonic() - started, most


def judged(lines: list[dict[str, object]]) -> int:
    rates = {
        side: statistics.median(
            float(str(line["bytes_per_second"])) for line in lines if line["side"] == side
        )
        for side in ("ours", "s5cmd")
    }
    ratio = rates["ours"] / rates["s5cmd"]
    memory = max(int(str(line["anonymous_bytes"])) for line in lines if line["side"] == "ours")
    print(
        f"ours {rates['ours'] / 1e6:.0f} MB/s, s5cmd {rates['s5cmd'] / 1e6:.0f} MB/s: {ratio:.2f} "
        f"(bar {LEAST_RATIO}); our memory at most {memory / 1e6:.0f} MB (bar {MOST_MEMORY / 1e6:.0f})"
    )
    return 0 if ratio >= LEAST_RATIO and memory < MOST_MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
