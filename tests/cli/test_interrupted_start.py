"""Ctrl-C while the program is still being loaded ends it as it ends any other, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HOOK = """
import os, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Early())
"""


def test_ctrl_c_before_the_command_line_is_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "gemma_neuron", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")
