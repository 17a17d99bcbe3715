"""The command line in a process of its own, as a user runs it."""

from __future__ import annotations

import subprocess
import sys


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`gemma-neuron` with these arguments; output as text, whatever the exit code."""
    command = [sys.executable, "-m", "gemma_neuron", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
