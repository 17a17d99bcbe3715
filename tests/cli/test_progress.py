"""Progress in bytes: a bar with share and rate on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gemma_neuron.render import progress as shown
from gemma_neuron.render.progress import ByteProgress

WORK = """
import time
from gemma_neuron.render.progress import ByteProgress
with ByteProgress() as progress:
    progress.begin("shard", 4_000_000)
    for rank in range(2):
        progress(1_000_000, rank)
        time.sleep(0.2)
"""


def test_a_terminal_has_a_bar_with_share_bytes_and_rate() -> None:
    own, given = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", WORK], stderr=given, check=True, env=environment)
    os.close(given)
    text = os.read(own, 1 << 16).decode(errors="replace")
    os.close(own)
    for part in ("shard: rank 1", "50%", "2.0/4.0 MB", "MB/s"):
        assert part in text, text


def test_a_pipe_has_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "PROGRESS_SECONDS", 0.0)
    with ByteProgress() as progress:
        progress.begin("shard", 4_000_000)
        progress(1_000_000, 0)
        progress(3_000_000, "a\x1b[2Jname")
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("shard: rank 0, 1.00 MB of 4.00 MB (25%) at ")
    assert "\x1b" not in second and "(100%)" in second
    assert last.startswith("shard: 4.00 MB of 4.00 MB (100%) at ") and last.endswith("/s")
