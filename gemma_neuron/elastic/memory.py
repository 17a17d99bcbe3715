"""What processes and all they started take of the host's memory, shared pages counted once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EXACT_BELOW_BYTES = 2 * 2**30
"""The kernel walks every page for a proportional size: tens of milliseconds for 2 GiB. In a larger process the few
hundred megabytes it shares are lost in the rest, and its resident size is taken as it stands."""


def tree(pids: Iterable[int]) -> Iterator[int]:
    """These processes and all their descendants that are there now; by the kernel's own lists, in no order."""
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        yield pid
        for task in _names(Path(f"/proc/{pid}/task")):
            try:
                text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            except OSError:
                continue
            waiting += map(int, text.split())


def resident_bytes(pid: int) -> int:
    """Resident bytes of one process, shared pages in full; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Resident bytes of one process, each shared page divided by those that share it; 0 once it is gone."""
    resident = resident_bytes(pid)
    if resident > EXACT_BELOW_BYTES:
        return resident
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return resident  # another user's, or gone meanwhile
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def tree_bytes(pid: int, *, exact: bool = True) -> int:
    """Bytes of a process and its descendants: proportional, or by `exact=False` resident, which is quick and an upper
    bound."""
    measure = proportional_bytes if exact else resident_bytes
    return sum(measure(member) for member in tree([pid]))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted, twenty times a second
    except OSError:
        return []
