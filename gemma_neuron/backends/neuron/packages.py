"""Installed packages against `data/neuron/versions.json`: which SDK release they are, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

MISSING = "none"
ALSO_JUDGED = ("neuronx-distributed-inference",)
"""Not used here, but a wrong one says that the environment was made for another chip."""
DECIDING = "neuronx-cc"
"""The package whose version names the release: no two releases share one."""


@dataclass(frozen=True, slots=True)
class Release:
    """One SDK release: its exact packages and, where this toolkit does not use it, why."""

    name: str
    role: str
    """primary, fallback or refused."""
    reason: str
    python: tuple[str, ...]
    packages: dict[str, str]
    system: dict[str, str]
    """Debian packages: driver, runtime, collectives, tools."""


@cache
def releases() -> tuple[Release, ...]:
    rows = _data()["releases"]
    return tuple(Release(**row | {"python": tuple(row["python"])}) for row in rows)


def release(name: str) -> Release:
    return next(r for r in releases() if r.name == name)


def refusal(found: Mapping[str, str]) -> str | None:
    """Why these installed versions cannot be used; None when they are one usable release.

    `found`: package → version, `none` for one that is not installed.
    """
    missing = [name for name in ("torch-neuronx", "neuronx-cc") if _of(found, name) == MISSING]
    if missing:
        return f"{', '.join(missing)} not installed"
    for rule in _data()["refused"]:
        if all(_matches(_of(found, name), pattern) for name, pattern in rule["when"].items()):
            shown = ", ".join(f"{name} {_of(found, name)}" for name in rule["when"])
            return f"{shown}: {rule['reason']}"
    installed = release_of(found)
    if installed is None:
        known = ", ".join(f"{r.packages[DECIDING]} ({r.name})" for r in releases())
        return (
            f"{DECIDING} {_of(found, DECIDING)} belongs to no release known here; known are {known}"
        )
    if installed.role == "refused":
        return f"these are the packages of SDK {installed.name}: {installed.reason}"
    wrong = mismatches(installed, found)
    return f"SDK {installed.name} pins {'; '.join(wrong)}" if wrong else None


def release_of(found: Mapping[str, str]) -> Release | None:
    """The release whose compiler is installed."""
    version = _of(found, DECIDING)
    return next((r for r in releases() if _starts(version, r.packages[DECIDING])), None)


def mismatches(wanted: Release, found: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {version}, found {_of(found, name)}"
        for name, version in wanted.packages.items()
        if name in found and not _starts(_of(found, name), version)
    ]


def _data() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("gemma_neuron.data").joinpath("neuron", "versions.json").read_text()
    data: dict[str, list[dict[str, Any]]] = json.loads(text)
    return data


def _of(found: Mapping[str, str], name: str) -> str:
    return found.get(name, MISSING)


def _starts(version: str, wanted: str) -> bool:
    """Builds add parts behind what a release names: 2.26.6360.0+4fd0a5b1."""
    return version == wanted or version.startswith((wanted + ".", wanted + "+"))


def _matches(version: str, pattern: str) -> bool:
    return version != MISSING and re.fullmatch(pattern, version) is not None
