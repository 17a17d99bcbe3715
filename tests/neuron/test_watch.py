"""What counts as a stall of a compiler, and how one is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.neuron.flow import ROOT

WATCHED = """
import subprocess, sys
from pathlib import Path
from gemma_neuron.backends.neuron.watch import CompilerStalledError, Watch
child = [sys.executable, "-c", sys.argv[2]]
try:
    Watch(Path(sys.argv[1]), 1.5).run(lambda: subprocess.run(child, check=True))
except CompilerStalledError as error:
    sys.exit(f"stalled: {error}")
"""
PRINTS = "import time; [(print('.', flush=True), time.sleep(0.5)) for _ in range(8)]"
WRITES = "import time; [(open({!r}, 'a').write('.'), time.sleep(0.5)) for _ in range(8)]"
SILENT = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SILENT}"


def watched(folder: Path, child: str) -> subprocess.CompletedProcess[bytes]:
    """A watch in a process whose output goes to a file, as a compile worker's does."""
    work, log = folder / "work", folder / "log"
    work.mkdir()
    with log.open("wb") as file:
        return subprocess.run(
            [sys.executable, "-c", WATCHED, str(work), child],
            stdout=file,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )


@pytest.mark.parametrize("where", ["its output", "a file"])
def test_a_compiler_that_says_something_now_and_then_goes_on(tmp_path: Path, where: str) -> None:
    child = PRINTS if where == "its output" else WRITES.format(str(tmp_path / "work" / "log.txt"))
    done = watched(tmp_path, child)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(("child", "least"), [(SILENT, 0), (DEAF, 10)], ids=["by TERM", "by KILL"])
def test_a_silent_idle_compiler_is_ended(tmp_path: Path, child: str, least: float) -> None:
    """One that does not heed TERM is killed after 10 s."""
    started = time.monotonic()
    done = watched(tmp_path, child)
    assert b"stalled: no output and under 1 % CPU" in done.stderr and b"1 processes" in done.stderr
    assert least <= time.monotonic() - started < 40
