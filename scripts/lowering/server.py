"""The process that has torch_xla (`child`), as main and execute ask it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scripts.checks import LAST_WORDS, Failed

ROOT = Path(__file__).parents[2]


class Child:
    """`with Child(python) as ask: ask({...})`: an answer, or Failed. Started with the first question."""

    def __init__(self, python: str) -> None:
        self._command = [python, "-m", "scripts.lowering.child"]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.communicate()

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            variables = {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT), "NXD_LOG_LEVEL": "error"}
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | variables,
                cwd=ROOT,
                text=True,
            )
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        try:
            to.write(json.dumps(asked) + "\n")
            to.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"{' '.join(self._command)} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Failed(found["error"].strip()[-LAST_WORDS:])
        return found
