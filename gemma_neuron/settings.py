"""How flags are read: sizes and counts as people write them, and lists.

Order of precedence: flag, then `GEMMA_NEURON_<COMMAND>_<FLAG>` in the environment (GEMMA_NEURON_COMPILE_TP),
then the default. An unreadable value is a SettingsError that shows what was given.
"""

from __future__ import annotations

import re

from gemma_neuron.errors import SettingsError

KEY_VARIABLE = "GEMMA_NEURON_API_KEY"
"""The server's key and its clients': from the environment alone, never on a command line."""
COUNT = re.compile(r"(\d{1,15})\s*([kK]?)", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")
K = 1024
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
SIZE_UNITS = "kmgt"


def count(text: str | None, flag: str) -> int | None:
    """`32k` or `32768` → 32768; None stays None. Raises SettingsError naming the flag."""
    if text is None:
        return None
    found = COUNT.fullmatch(text.strip())
    if found is None:
        raise SettingsError(
            f"{flag} {text!r} is no count.", f"Write a whole number or thousands: {flag} 32k."
        )
    return int(found[1]) * (K if found[2] else 1)


def size(text: str | None, flag: str) -> int | None:
    """`384GB` (decimal), `512MiB` (binary) or plain bytes → bytes; None stays None. Raises SettingsError."""
    if text is None:
        return None
    found = SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0 or (found[3] and not found[2]):
        raise SettingsError(
            f"{flag} {text!r} is no size.",
            f"Write a number and a unit: {flag} 384GB, {flag} 64GiB.",
        )
    power = SIZE_UNITS.index(found[2].lower()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def digest(text: str | None, flag: str) -> str:
    """A port's digest, 64 hexadecimal digits; empty for None. Raises SettingsError naming the flag."""
    if text is None:
        return ""
    if not DIGEST.fullmatch(text.strip().lower()):
        raise SettingsError(
            f"{flag} {text!r} is no digest of 64 hexadecimal digits.",
            "Take the one that `compile` or `mirror pull` printed.",
        )
    return text.strip().lower()


def counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    """`128,512` or `1k` → a tuple; None stays None. Raises SettingsError naming the flag."""
    if text is None:
        return None
    return tuple(count(part, flag) or 0 for part in text.split(","))


def choice(text: str, flag: str, known: tuple[str, ...]) -> str:
    """`text`, one of `known`. Raises SettingsError naming the flag."""
    if text not in known:
        raise SettingsError(f"{flag} {text!r} is none of {', '.join(known)}.", f"{flag} {known[0]}")
    return text


def level_range(text: str | None) -> frozenset[int] | None:
    """`0-6`, `0,3` or `2` → level numbers; None stays None. Raises SettingsError."""
    if text is None:
        return None
    levels: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d)(?:-(\d))?\s*", part)
        if (
            found is None
            or int(found[2] or found[1]) < int(found[1])
            or int(found[2] or found[1]) > 7
        ):
            raise SettingsError(
                f"--levels {text!r} is no list of levels 0 to 7.", "For example --levels 0-6."
            )
        levels.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(levels)
