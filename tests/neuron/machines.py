"""Recorded-style output of AWS's tools: an inf2.24xlarge in several states, as executables on PATH.

Keys as the tools' documentation gives them; values are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHIPS = 6
HBM_BYTES = 34_359_738_368


def devices(**first: Any) -> list[dict[str, Any]]:
    """`neuron-ls -j`; `first` changes the first device's entry."""
    rows = [
        {
            "neuron_device": i,
            "bdf": f"10:{i:02x}.0",
            "connected_to": [(i - 1) % CHIPS, (i + 1) % CHIPS],
            "nc_count": 2,
            "memory_size": HBM_BYTES,
            "neuroncore_ids": [2 * i, 2 * i + 1],
            "neuron_processes": [],
        }
        for i in range(CHIPS)
    ]
    rows[0] |= first
    return rows


def report(
    *, uncorrected: int = 0, hardware: int = 0, timed_out: int = 0, in_use: Sequence[int] = ()
) -> dict[str, Any]:
    """One line of `neuron-monitor`. `in_use`: cores that a process 4242 holds."""
    stats = {
        "error_summary": {"generic": 0, "numerical": 0, "runtime": 0, "hardware": hardware},
        "execution_summary": {"completed": 120, "timed_out": timed_out},
    }
    counters = [
        {
            "neuron_device_index": i,
            "mem_ecc_corrected": 3,
            "mem_ecc_uncorrected": uncorrected if i == 0 else 0,
            "sram_ecc_uncorrected": 0,
        }
        for i in range(CHIPS)
    ]
    return {
        "neuron_runtime_data": [
            {
                "pid": 4242,
                "neuron_runtime_tag": "gemma-neuron",
                "error": "",
                "report": {
                    "execution_stats": {"period": 5.0, "error": "", **stats},
                    "neuroncore_counters": {
                        "neuroncores_in_use": {
                            str(core): {"neuroncore_utilization": 31.5} for core in in_use
                        }
                    },
                },
            }
        ],
        "system_data": {"neuron_hw_counters": {"neuron_devices": counters, "error": ""}},
        "instance_info": {"instance_type": "inf2.24xlarge", "error": ""},
        "neuron_hardware_info": {"neuron_device_count": CHIPS, "error": ""},
    }


def install(folder: Path, ls: object, monitor: object, env: dict[str, str]) -> dict[str, str]:
    """The environment with `neuron-ls` and `neuron-monitor` that print these; the monitor goes on as the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, output, after in (
        ("neuron-ls", ls, ""),
        ("neuron-monitor", monitor, "exec sleep 600"),
    ):
        text = output if isinstance(output, str) else json.dumps(output)
        (folder / f"{name}.out").write_text(text + "\n")
        tool = folder / name
        tool.write_text(f'#!/bin/sh\ncat "{folder}/{name}.out"\n{after}\n')
        tool.chmod(0o755)
    return env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}
