"""How much memory a process here may use: the machine's, or less where a container says so.

In: nothing, or a root folder to read `/proc` and `/sys` under. Out: `MemoryLimit`. Control groups of both versions
are read, and of a group's ancestors too: the smallest limit counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GIB = 2**30
RESERVE_BYTES = 8 * GIB
RESERVE_SHARE = 0.04
"""Left to the system: the larger of 8 GiB and 4 %. On 384 GiB that leaves 368.6, the 369 that were usable there."""
LARGEST_RESERVE_SHARE = 0.5
"""Of a machine below 16 GiB at most half is held back, or nothing could be done on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """`total` bytes by `origin` (machine or container)."""

    total: int
    origin: str

    @property
    def budget(self) -> int:
        """What is left after the reserve, in bytes."""
        return budget_of(self.total)


def budget_of(total: int) -> int:
    """`total` bytes less the reserve."""
    reserve = max(RESERVE_BYTES, int(total * RESERVE_SHARE))
    return total - min(reserve, int(total * LARGEST_RESERVE_SHARE))


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The machine's memory, or the smallest limit of this process's control groups when that is less."""
    total = _machine_bytes(root)
    container = min(_group_limits(root), default=total)
    if container < total:
        return MemoryLimit(total=container, origin="container")
    return MemoryLimit(total=total, origin="machine")


def instance_type(root: Path = Path("/")) -> str:
    """EC2's instance type as the firmware names it, without asking the network; empty elsewhere."""
    try:
        return (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        return ""


def _machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux


def _group_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's control groups and their ancestors; unset and unreadable ones left out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's and not exist here: the mount's own limit then counts.
        for folder in (group, *group.parents):
            try:
                text = (mount / folder / name).read_text().strip()
            except OSError:
                continue
            if (
                text.isdigit()
            ):  # v2 writes `max` for none; v1 a number near 2**63, which no machine has
                yield int(text)
