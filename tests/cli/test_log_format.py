"""`--log-format json`: every line of stderr is one JSON object, whoever wrote it; stdout is left as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def lines(*arguments: object, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout and stderr's lines of a command."""
    command = [sys.executable, "-m", "gemma_neuron", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_failure_is_objects_with_time_and_level(tmp_path: Path, way: str) -> None:
    flags = ("--log-format", "json") if way == "flag" else ()
    variables = {"GEMMA_NEURON_LOG_FORMAT": "json"} if way == "variable" else {}
    code, out, said = lines(*flags, "inspect", tmp_path / "nothing", **variables)
    assert code == 3 and out == ""
    error, hint = map(json.loads, said)
    assert error["level"] == "error" and error["event"].startswith("error: ")
    assert hint["level"] == "info" and hint["event"].startswith("hint: ")
    assert error["logger"] == "gemma_neuron" and error["time"].endswith("Z")


def test_a_form_that_does_not_exist_is_named() -> None:
    code, out, said = lines("--log-format", "xml", "doctor")
    assert code == 2 and out == ""
    assert "'xml' is not one of 'text', 'json'" in said[0]
