"""The compiler's flags per phase, in the spellings NxD recognises.

NxD adds what it does not find, by exact text: `--auto-cast none` and `--optlevel 2` would stand beside an added
`--auto-cast=none` and `-O1`. The unit that chooses the layout gets no default `-O` and no saturation, so every
unit is given all of them.
"""

from __future__ import annotations

TARGET = "inf2"
LOGICAL_CORES = 1
"""Inferentia2 has no logical cores of two: anything else is NCC_EARG001."""

COMMON = (
    "--enable-saturate-infinity",
    "--auto-cast=none",
    "--model-type=transformer",
    f"--lnc={LOGICAL_CORES}",
    f"--target={TARGET}",
    "--verbose=35",
)
LEVEL = {"decode": "-O2", "prefill": "-O1", "score": "-O1"}
"""Decode runs once a token and repays the longer compile; prefill graphs are large and compile slowly as it is."""


def flags(phase: str) -> str:
    """All flags of a phase's graph but the log file's path, which NxD adds and no key may hold."""
    return " ".join((LEVEL[phase], *COMMON))


def layout_flags() -> str:
    """What NxD gives the layout unit by itself; stated because it is part of that unit's key."""
    return f"--model-type=transformer --lnc={LOGICAL_CORES} (NxD's own)"
