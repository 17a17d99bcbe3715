"""serve-local on a port, and every client of `scripts.clients.ask` put to it from the environment that has them."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.clients.ask import CLIENTS  # noqa: E402
from scripts.served import bundled, served  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=Path, help="a port of the bundled model; default: made here")
    parser.add_argument(
        "--only", action="append", default=[], choices=CLIENTS, help="one client; may be repeated"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        port = asked.port.resolve() if asked.port else bundled(Path(work) / "port", "--tp", "2")
        with served(port) as server:
            only = [word for name in asked.only for word in ("--only", name)]
            told = ["-m", "scripts.clients.ask", server.url, str(port / "source"), *only]
            return subprocess.run([asked.python, *told], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
