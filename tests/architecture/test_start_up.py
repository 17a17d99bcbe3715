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
    "bench",
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
    "tune",
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


@pytest.mark.parametrize("command", ["scan", "watch", "launch"])
def test_help_of_spot_imports_nothing_heavy(command: str) -> None:
    found = run_probe("spot", command, "--help")
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


def cpu_seconds(*command: str) -> float:
    """What one run of Python costs: CPU or wall seconds, whichever is less, so that other work does not count."""
    before, started = os.times(), time.monotonic()
    done = subprocess.run([sys.executable, *command], capture_output=True, check=False)
    after = os.times()
    assert done.returncode == 0, done.stderr
    cpu = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    return min(cpu, time.monotonic() - started)


def test_help_and_plan_start_fast(config_only: Path) -> None:
    """Medians of five. The bars, 0.4 and 1.0 s, hold where importing the libraries alone takes 0.15 s; a slower machine
    gets as much more as it is slower."""
    commands = {
        "libraries": ("-c", "import pydantic, typer"),
        "help": ("-m", "gemma_neuron", "--help"),
        "plan": ("-m", "gemma_neuron", "plan", str(config_only), "--tp", "2"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(5):  # in turn, so that all see the same machine
        for name, command in commands.items():
            seconds[name].append(cpu_seconds(*command))
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    slower = max(1.0, median["libraries"] / 0.15)
    assert median["help"] < 0.4 * slower and median["plan"] < 1.0 * slower, median
