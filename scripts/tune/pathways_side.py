"""Scenarios through the real pathwaysutils Manager: JSON lines in, JSON lines out. Needs jax and nothing of ours.

Slices are faked where the library asks for them: `get_active_slice_indices` says which there are. Everything else,
the decorator's loop, its waiting and its reading of errors, is the library's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
from pathwaysutils.elastic import elastic, manager


class Slice:
    """A device as far as `get_slice_to_devices` looks."""

    def __init__(self, index: int) -> None:
        self.slice_index = index


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    active = frozenset(range(scenario.get("available", 2)))
    elastic.get_active_slice_indices = lambda *_, **__: active
    made = manager.Manager([Slice(0), Slice(1)])
    made.slice_to_devices = {index: [jax.devices()[0]] for index in range(2)}
    faults, calls, callbacks = list(scenario["faults"]), 0, 0

    def called_back() -> None:
        nonlocal callbacks
        callbacks += 1

    def function() -> str:
        nonlocal calls
        calls += 1
        if faults:
            raise error(faults.pop(0))
        return "done"

    policy = {}
    if "limit" in scenario:
        policy["retry_policy"] = manager.ElasticRetryLimit(scenario["limit"])
    decorated = made.elastic_retry(
        minimum_slice_count=scenario.get("minimum"),
        poll_interval=0.05,
        timeout=scenario.get("timeout", 5.0),
        on_elastic_event_callback=called_back,
        **policy,
    )(function)
    try:
        ended = decorated()
    except Exception as raised:
        ended = type(raised).__name__
    return {"calls": calls, "ended": ended, "callbacks": callbacks}


def error(fault: str) -> Exception:
    if fault == "scale up":
        return manager.ScaleUpSignalError()
    if fault == "ValueError":
        return ValueError("ordinary")
    return jax.errors.JaxRuntimeError(
        {"replica down": "DATA_LOSS: slice 1 is gone"}.get(fault, fault)
    )


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
