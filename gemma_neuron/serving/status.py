"""`/status`: what is served, what its validation found, how each replica does, and the port's last events.

For people, on the page's status view; the fields are stable all the same.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import platform
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from gemma_neuron.port import VERDICT_NAME
from gemma_neuron.serving.service import Service

if TYPE_CHECKING:
    from gemma_neuron.port import Port

SCHEMA = 1
EVENTS_SHOWN = 50
EVENT_BYTES = 64 * 1024
"""Of the end of events.jsonl, which grows with the port's age."""
LONGEST_TEXT = 500


def add_status(app: FastAPI, service: Service) -> None:
    """The route `/status`."""
    port = service.info.port
    fixed = {} if port is None else port_facts(port, service.info.validated)
    versions = server_versions()

    @app.get("/status")
    async def status() -> dict[str, Any]:
        events = [] if port is None else await asyncio.to_thread(last_events, port)
        return {
            "schema": SCHEMA,
            "model": model_facts(service),
            **live_facts(service),
            "port": fixed or None,
            "versions": versions,
            "events": events,
        }


def model_facts(service: Service) -> dict[str, Any]:
    info, limits, markers = service.info, service.engine.limits, service.assets.markers
    defaults = info.defaults
    chat = service.assets.template is not None
    return {
        "id": info.model_id,
        "verdict": info.verdict,
        "validated": info.validated,
        "chat": chat,
        "thinking": chat and markers is not None and markers.think is not None,
        "max_context": None if limits is None else limits.max_context,
        "defaults": {
            name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")
        },
    }


def live_facts(service: Service) -> dict[str, Any]:
    """What changes while it serves. `queue`: requests that no slot holds yet."""
    engine = service.engine
    states, limits = engine.states(), engine.limits
    slots = 0 if limits is None else limits.slots
    return {
        "phase": engine.phase,
        "uptime_seconds": round(time.time() - service.info.created),
        "queue": engine.waiting() + sum(state.load.waiting for state in states),
        "replicas": [
            {
                "index": state.index,
                "pid": state.pid,
                "phase": state.phase,
                "seconds": state.seconds,
                "restarts": state.restarts,
                "slots": slots,
                "running": state.load.running,
                "kv_tokens": state.load.kv_tokens,
                "kv_capacity": state.load.kv_capacity,
                "prefix_tokens": state.load.prefix_tokens,
            }
            for state in states
        ],
    }


def port_facts(port: Port, validated: bool) -> dict[str, Any]:
    """What does not change while a port is served: its record, its plan's outline, its validation."""
    record = port.record
    plan = port.read_json("plan.json") or {}
    shape = record.model_dump(mode="json")["compile"] or {}
    return {
        "digest": record.digest,
        "source": record.source.model_dump(mode="json"),
        "fingerprints": record.fingerprints.model_dump(mode="json"),
        "shape": {name: shown(plan[name]) for name in ("tp", "strategy") if name in plan} | shape,
        "versions": record.versions,
        "warnings": list(record.warnings),
        "validation": validation_facts(port),
    }


def validation_facts(port: Port) -> dict[str, Any] | None:
    """The levels of the verdict that counts for this port; None when there is none."""
    if port.verdict() is None:
        return None
    report = port.read_json(VERDICT_NAME) or {}
    levels = report.get("levels")
    names = ("level", "name", "status", "reason")
    return {
        "scope": shown(report.get("scope")),
        "levels": [
            {name: shown(level.get(name)) for name in names}
            for level in (levels if isinstance(levels, list) else [])
            if isinstance(level, dict)
        ],
        "warnings": [shown(text) for text in report.get("warnings") or []],
    }


def last_events(port: Port) -> list[dict[str, Any]]:
    """The newest first."""
    lines = port.events(last_bytes=EVENT_BYTES)[-EVENTS_SHOWN:]
    return [{str(name): shown(value) for name, value in line.items()} for line in lines[::-1]]


def shown(value: object) -> str | int | float | bool | None:
    """A value of a file as JSON can carry it: a number that is one, else bounded text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)[:LONGEST_TEXT].encode("utf-8", "replace").decode()


def server_versions() -> dict[str, str]:
    """What runs now, beside what the port was made with."""
    names = ("gemma-neuron", "torch", "tokenizers")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version()}
