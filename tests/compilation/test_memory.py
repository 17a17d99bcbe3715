"""Units that allocate as told, real processes: the budget holds, the kernel's killer is recognised, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.elastic.memory import tree_bytes
from gemma_neuron.machine import control_groups

ROOT = Path(__file__).parents[2]
BUDGET_MIB = 768
OVER = 1.05


def run(folder: Path, group: Path | None = None, **told: Any) -> tuple[dict[str, Any], int]:
    """What the controller said, and the largest proportional size of its process tree, in bytes."""
    facts = json.dumps({"budget": BUDGET_MIB, "blind": False} | told)
    command = [sys.executable, "-m", "tests.compilation.memory_run", str(folder), facts]
    if group is not None:
        into = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["bash", "-c", into, "run", *command]
    peak = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        return json.loads(process.stdout.read()), peak


def test_wrong_predictions_do_not_break_the_budget(tmp_path: Path) -> None:
    """Four units, each predicted at a third of what it takes: all are admitted, and three would not fit."""
    units = {f"unit{n}": [100, f"after unit3; allocate {300 - 20 * n} 80 0.5"] for n in range(4)}
    said, peak = run(tmp_path, units=units)
    assert said["error"] is None and len(said["peaks"]) == 4
    assert peak <= OVER * BUDGET_MIB * 2**20, peak / 2**20
    stopped = [event.split()[1] for event in said["events"] if event.startswith("stopped_for")]
    assert stopped and all(said["starts"][name] == 1 + stopped.count(name) for name in units)
    assert "unit0" not in stopped  # it was started first
    for name, taken in said["peaks"].items():
        assert taken == pytest.approx((300 - 20 * int(name[-1])) * 2**20, rel=0.15)


def test_right_predictions_let_nothing_be_stopped(tmp_path: Path) -> None:
    units = {f"unit{n}": [310, "allocate 280 200 0.3"] for n in range(3)}
    said, peak = run(tmp_path, units=units)
    assert said["error"] is None and set(said["starts"].values()) == {1}
    assert peak <= BUDGET_MIB * 2**20


def test_a_unit_that_alone_passes_the_budget_is_stopped_and_the_others_are_built(
    tmp_path: Path,
) -> None:
    said, peak = run(
        tmp_path, units={"big": [100, "allocate 900 200 5"], "small": [100, "sleep 0.1"]}
    )
    assert said["error"]["exit_code"] == 4
    assert "Compiling big alone took" in said["error"]["message"]
    assert f"{BUDGET_MIB << 20:,} may be used (the test)" in said["error"]["message"]
    assert list(said["peaks"]) == ["small"]
    assert peak <= OVER * BUDGET_MIB * 2**20, peak / 2**20


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of 256 MiB below our own."""
    own = next((group for group in control_groups() if group.version == 1), None)
    if own is None or not os.access(own.folder / "cgroup.procs", os.W_OK):
        pytest.skip("no control group of version 1 can be made here")
    group = own.folder / f"memory-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    yield group
    end = time.monotonic() + 5
    while (group / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.fault("cc-01-f137")
def test_the_kernels_killer_is_named_and_the_unit_is_built_alone(
    tmp_path: Path, limited: Path
) -> None:
    units = {f"unit{n}": [10, "after unit1; allocate 120 100 1.5"] for n in range(2)}
    said, _ = run(tmp_path, limited, units=units, blind=True)
    assert said["error"] is None and sorted(said["peaks"]) == ["unit0", "unit1"]
    (killed,) = [event.split()[1] for event in said["events"] if event.startswith("oom_killed")]
    assert said["starts"][killed] == 2


def test_a_group_that_fills_up_stops_a_unit_before_the_kernel_does(
    tmp_path: Path, limited: Path
) -> None:
    units = {f"unit{n}": [10, "after unit1; allocate 120 40 1.0"] for n in range(2)}
    said, _ = run(tmp_path, limited, units=units)
    assert said["error"] is None and sorted(said["peaks"]) == ["unit0", "unit1"]
    kinds = {event.split()[0] for event in said["events"]}
    assert "stopped_for_memory" in kinds and "oom_killed" not in kinds
