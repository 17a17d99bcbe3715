"""`python -m gemma_neuron` with an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

FORGOTTEN = ("HF_", "HUGGING", "AWS_", "GEMMA_NEURON", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

MOST_SECONDS = 400
"""Of a command, on a busy machine."""


def clean_environment() -> dict[str, str]:
    """This process's, without what belongs to a user's hub, cloud or proxy."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(FORGOTTEN)}
    return kept | {"NO_PROXY": "*"}


@dataclass(frozen=True)
class Commands:
    """Runs commands; `refused` checks how a refusal looks."""

    environment: dict[str, str]

    def having(self, **more: str) -> Commands:
        return Commands(self.environment | more)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gemma_neuron", *map(str, arguments)]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def done(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        found = self.run(*arguments)
        assert found.returncode == 0, (found.returncode, found.stdout, found.stderr)
        return found

    def document(self, *arguments: object) -> dict[str, Any]:
        """The one JSON document of a command that succeeds."""
        document: dict[str, Any] = json.loads(self.done(*arguments, "--json").stdout)
        return document

    def refused(self, code: int, *arguments: object) -> str:
        """What a refusal says; never a traceback, always one error and a hint."""
        return refusal(code, self.run(*arguments))


def refusal(code: int, found: subprocess.CompletedProcess[str]) -> str:
    assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    assert found.stderr.count("error: ") == 1
    assert "hint: " in found.stderr
    return found.stderr
