"""serve-local on a port, and schemathesis put to it in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402

from scripts.served import bundled, served  # noqa: E402

ANSWER_SECONDS = 120
SHAPE = ("--tp", "2", "--max-context", "256", "--slots", "4", "--buckets", "32,64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("port", type=Path, nargs="?", help="default: the bundled model's, made")
    parser.add_argument("--count", type=int, default=100, help="examples an operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("check-api-port"))
    asked = parser.parse_args()
    port = asked.port or bundled(asked.work, *SHAPE)
    with served(port) as server:
        command = [asked.tool.absolute(), "run", f"{server.url}/openapi.json"]
        command += ["--checks", "not_a_server_error", "--mode", "all", "--continue-on-failure"]
        command += ["--max-examples", str(asked.count), "--seed", str(asked.seed)]
        command += ["--request-timeout", str(ANSWER_SECONDS), "--no-color"]
        code = subprocess.run(command, cwd=asked.tool.parent, check=False).returncode
        document = httpx2.get(f"{server.url}/openapi.json").json()
        ready = httpx2.get(f"{server.url}/health/ready").status_code
    operations = [f"{how} {path}" for path, ways in document["paths"].items() for how in ways]
    good = code == 0 and ready == 200 and server.process.returncode == 0 and bool(operations)
    print(json.dumps({"total": {"good": good, "operations": operations, "exit_code": code}}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
