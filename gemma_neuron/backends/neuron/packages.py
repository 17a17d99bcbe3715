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
        minor = installed.name.rpartition(".")[0]
        return f"these are the packages of SDK {minor}: {installed.reason}"
    wrong = mismatches(installed, found)
    return f"SDK {installed.name} pins {'; '.join(wrong)}" if wrong else None


def release_of(found: Mapping[str, str]) -> Release | None:
    """The release whose compiler is installed. A refused release stands for all of its minor version."""
    version = _of(found, DECIDING)
    exact = (r for r in releases() if _starts(version, r.packages[DECIDING]))
    minor = numbers(version)[:2]
    alike = (
        r for r in releases() if r.role == "refused" and minor == numbers(r.packages[DECIDING])[:2]
    )
    return next(exact, None) or next(alike, None)


def driver_of_runtime(runtime: str) -> str:
    """The driver that the newest release with a runtime up to this one came with; empty when none is as old."""
    known = [
        (numbers(r.system["aws-neuronx-runtime-lib"]), r.system["aws-neuronx-dkms"])
        for r in releases()
    ]
    return max(
        ((has, driver) for has, driver in known if has <= numbers(runtime)), default=((), "")
    )[1]


def numbers(version: str) -> tuple[int, ...]:
    """For comparing: the dotted numbers, without a build's suffix."""
    head = re.split(r"[-+]", version, maxsplit=1)[0]
    return tuple(int(part) for part in head.split(".") if part.isdigit())


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
