"""What starts without torch, and how fast; the pinned command surface."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import gemma4_config, write_tiny_gemma4

HEAVY = ("torch", "transformers", "fastapi", "safetensors.torch", "huggingface_hub", "boto3")
COMMANDS = [
    "chat",
    "compile",
    "demo",
    "doctor",
    "golden",
    "inspect",
    "merge",
    "plan",
    "serve-local",
    "shard",
    "validate",
]
PROBE = """
import sys
from gemma_neuron.cli import main
sys.argv = ["gemma-neuron", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    code = ended.code
heavy = [name for name in {heavy!r} if name in sys.modules]
print("HEAVY", heavy, file=sys.stderr)
sys.exit(code or (99 if heavy else 0))
"""


def run_probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter; exit 99 when it imported something heavy."""
    code = PROBE.format(heavy=HEAVY)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(gemma4_config()))
    return tmp_path


def test_help_imports_nothing_heavy() -> None:
    assert run_probe("--help").returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_imports_nothing_heavy(command: str) -> None:
    found = run_probe(command, "--help")
    assert found.returncode == 0, found.stderr


def test_plan_imports_nothing_heavy(config_only: Path) -> None:
    found = run_probe("plan", str(config_only), "--tp", "2", "--max-context", "128")
    assert found.returncode == 0, found.stderr


def test_inspect_imports_nothing_heavy(tmp_path: Path) -> None:
    found = run_probe("inspect", str(write_tiny_gemma4(tmp_path / "source")))
    assert found.returncode == 0, found.stderr


def test_commands_are_these() -> None:
    from gemma_neuron.cli import app

    names = [c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands]
    assert sorted(names) == COMMANDS


def test_help_and_plan_start_fast(config_only: Path) -> None:
    """CPU seconds, median of five: what the commands cost, whatever else the machine does."""
    for limit, arguments in ((0.4, ["--help"]), (1.0, ["plan", str(config_only), "--tp", "2"])):
        seconds = []
        for _ in range(5):
            before = os.times()
            started = time.monotonic()
            command = [sys.executable, "-m", "gemma_neuron", *arguments]
            done = subprocess.run(command, capture_output=True, check=False)
            after = os.times()
            assert done.returncode == 0, done.stderr
            cpu = after.children_user - before.children_user
            cpu += after.children_system - before.children_system
            seconds.append(min(cpu, time.monotonic() - started))
        assert statistics.median(seconds) < limit
