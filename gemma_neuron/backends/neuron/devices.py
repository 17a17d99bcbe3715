"""What AWS's tools say of the devices: `neuron-ls -j` and one line of `neuron-monitor`, read tolerantly.

Older tools lack some keys, and each group of the monitor's report may carry an error in place of its values.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TOOLS_FOLDER = Path("/opt/aws/neuron/bin")
LS_SECONDS = 30
MONITOR_SECONDS = 20
"""The monitor reports every 5 seconds unless told otherwise."""
END_SECONDS = 5
LONGEST_REPORT = 2**24
LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Devices:
    """`cores` and the processes on them; `problem` when there is no list."""

    cores: int = 0
    devices: int = 0
    memory_bytes: int = 0
    processes: tuple[tuple[int, str], ...] = ()
    contiguous: bool = True
    problem: str = ""
    installed: bool = True
    """False where the tool itself is not there."""


@dataclass(frozen=True, slots=True)
class Health:
    """One report of the monitor. Counters are sums over devices and processes."""

    instance_type: str = ""
    uncorrected: int = 0
    hardware_errors: int = 0
    runtime_errors: int = 0
    timed_out: int = 0
    processes: tuple[tuple[int, str], ...] = ()
    """Those that hold cores: older `neuron-ls` do not list them."""
    problems: tuple[str, ...] = field(default=())


def tool(name: str) -> str | None:
    """Path of one of AWS's tools: on PATH, or where its package puts it."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}{TOOLS_FOLDER}")


@cache
def list_devices() -> Devices:
    """Devices of this machine by `neuron-ls -j`."""
    path = tool("neuron-ls")
    if path is None:
        return Devices(problem="neuron-ls is not installed", installed=False)
    try:
        ran = subprocess.run(
            [path, "-j"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Devices(problem=f"neuron-ls did not answer within {LS_SECONDS} s")
    except OSError as error:
        return Devices(problem=f"neuron-ls cannot be run: {error.strerror or error}")
    if ran.returncode != 0:
        said = _shown(ran.stderr or ran.stdout)
        return Devices(problem=f"neuron-ls failed (exit {ran.returncode}): {said}")
    return parse_devices(ran.stdout)


def core_count() -> int | None:
    """NeuronCores of this machine; None when the tools cannot tell."""
    found = list_devices()
    return None if found.problem else found.cores


def parse_devices(text: str) -> Devices:
    listed = _parsed(text)
    if listed is None:
        return Devices(problem=f"neuron-ls wrote no JSON: {_shown(text)}")
    if isinstance(listed, dict):
        listed = listed.get("neuron_devices", listed.get("mlas"))
    rows = _rows(listed)
    numbers = [_whole(row.get("neuron_device", i)) for i, row in enumerate(rows)]
    cores = [_whole(row.get("nc_count")) for row in rows]
    silent = "neuron-ls tells no core count of a device" if not all(cores) else ""
    return Devices(
        cores=sum(cores),
        devices=len(rows),
        memory_bytes=sum(_whole(row.get("memory_size", 0)) for row in rows),
        processes=tuple(
            (_whole(p.get("pid", 0)), str(p.get("command", "?")))
            for row in rows
            for p in _rows(row.get("neuron_processes"))
        ),
        contiguous=sorted(numbers) == list(range(len(numbers))),
        problem=silent if rows else "neuron-ls lists no device",
    )


def read_monitor() -> Health:
    """The monitor's first report; it is ended after one line."""
    path = tool("neuron-monitor")
    if path is None:
        return Health(problems=("neuron-monitor is not installed",))
    try:
        running = subprocess.Popen([path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        return Health(problems=(f"neuron-monitor cannot be run: {error.strerror or error}",))
    with running:
        line = _first_line(running)
        running.terminate()
        try:
            running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
    return parse_health(line)


def _first_line(running: subprocess.Popen[bytes]) -> str:
    """What there is of it in time: the monitor may also stop within a line."""
    assert running.stdout is not None
    source, until, line = running.stdout.fileno(), time.monotonic() + MONITOR_SECONDS, bytearray()
    while b"\n" not in line and len(line) < LONGEST_REPORT:
        ready, _, _ = select.select([source], [], [], max(0.0, until - time.monotonic()))
        part = os.read(source, 65536) if ready else b""
        if not part:
            break
        line += part
    return line.partition(b"\n")[0].decode(errors="replace")


def parse_health(line: str) -> Health:
    report = _parsed(line)
    if not isinstance(report, dict):
        return Health(problems=(f"neuron-monitor wrote no report: {_shown(line)}",))
    runtimes = [_at(row, "report") for row in _rows(report.get("neuron_runtime_data"))]
    counters = _rows(_at(report, "system_data", "neuron_hw_counters").get("neuron_devices"))
    return Health(
        instance_type=str(_at(report, "instance_info").get("instance_type", "")),
        uncorrected=sum(
            _whole(row.get("mem_ecc_uncorrected", 0)) + _whole(row.get("sram_ecc_uncorrected", 0))
            for row in counters
        ),
        hardware_errors=_total(runtimes, "error_summary", "hardware"),
        runtime_errors=_total(runtimes, "error_summary", "runtime"),
        timed_out=_total(runtimes, "execution_summary", "timed_out"),
        processes=tuple(
            (_whole(row.get("pid")), str(row.get("neuron_runtime_tag") or "?"))
            for row in _rows(report.get("neuron_runtime_data"))
            if _at(row, "report", "neuroncore_counters", "neuroncores_in_use")
        ),
        problems=tuple(_errors(report)),
    )


def _errors(value: object, where: str = "") -> Iterator[str]:
    """What stands in any group's `error`, with the group's name: its counters are missing or old then."""
    if isinstance(value, list):
        for item in value:
            yield from _errors(item, where)
    elif isinstance(value, dict):
        error = value.get("error")
        if isinstance(error, str) and error:
            yield f"{where}: {_shown(error)}" if where else _shown(error)
        for key, item in value.items():
            yield from _errors(item, key)


def _total(runtimes: list[dict[str, Any]], group: str, name: str) -> int:
    return sum(_whole(_at(r, "execution_stats", group).get(name, 0)) for r in runtimes)


def _at(value: object, *keys: str) -> dict[str, Any]:
    """The object at a path of keys; empty where any of them is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _rows(value: object) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _whole(value: object) -> int:
    """A count; 0 for what is none."""
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _parsed(text: str) -> object:
    """The JSON value; None for a text that is none, or nested too deep to be read."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _shown(text: str) -> str:
    return text.strip()[:LONGEST_SHOWN] or "nothing"
