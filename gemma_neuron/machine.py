"""What this machine is to a process: the memory it may use, its own or less in a container, and the CPU's capability.

In: nothing, or a root folder to read `/proc` and `/sys` under. Control groups of both versions are
read, and of a group's ancestors too: the smallest limit counts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

GIB = 2**30
RESERVE_BYTES = 8 * GIB
RESERVE_SHARE = 0.04
"""Left to the system: the larger of 8 GiB and 4 %. On 384 GiB that leaves 368.6, the 369 that were usable there."""
LARGEST_RESERVE_SHARE = 0.5
"""Of a machine below 16 GiB at most half is held back, or nothing could be done on it."""


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Bytes that a process and all it starts may take, and where the number comes from, for people."""

    bytes: int
    origin: str


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
    limits = [group.limit for group in control_groups(root)]
    container = min((limit for limit in limits if limit is not None), default=total)
    if container < total:
        return MemoryLimit(total=container, origin="container")
    return MemoryLimit(total=total, origin="machine")


def how_many_fit(peaks: Sequence[int], budget: int) -> int:
    """How many processes of these peaks fit `budget` together, the largest first; at least one."""
    total, count = 0, 0
    for peak in sorted(peaks, reverse=True):
        total += peak
        if total > budget:
            break
        count += 1
    return max(1, count)


def instance_type(root: Path = Path("/")) -> str:
    """EC2's instance type as the firmware names it, without asking the network; empty elsewhere."""
    try:
        return (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        return ""


def is_ec2(root: Path = Path("/")) -> bool:
    """Whether the firmware says that this is an EC2 instance."""
    try:
        return (root / "sys/devices/virtual/dmi/id/sys_vendor").read_text().strip() == "Amazon EC2"
    except OSError:
        return False


@cache
def cpu_capability() -> str:
    """torch's name for the vector instructions generated code will use (AVX2, AVX512, …).

    Read from the kernel's flags as torch does, so that nobody needs torch to tell two machines apart.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.machine()
    flags: set[str] = set()
    for line in info.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    wanted = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "avx2", "fma", "asimd")
    return "+".join(flag for flag in (*wanted, "sve") if flag in flags) or "scalar"


def _machine_bytes(root: Path) -> int:
    found = _meminfo(root, "MemTotal")
    if found is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux
    return found


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had now: what the machine has available, or what its control groups leave when that is less."""
    left = [
        group.limit - group.used for group in control_groups(root) if group.limit and group.used
    ]
    return max(0, min(_meminfo(root, "MemAvailable") or _machine_bytes(root), *left, 2**63))


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A memory control group this process is in, itself or by a descendant. Figures are None where unreadable."""

    folder: Path
    version: int

    @property
    def limit(self) -> int | None:
        """Its limit in bytes, at least 1; None for none. Version 1 writes a number near 2**63 then, which no machine
        has. In version 2 `memory.high` counts too: past it the kernel slows a group down until it stands."""
        texts = [self._text("memory.limit_in_bytes", "memory.max")]
        if self.version == 2:
            texts.append(self._text("", "memory.high"))
        limits = [int(text) for text in texts if text.strip().isdigit()]
        return max(1, min(limits)) if limits else None

    @property
    def used(self) -> int | None:
        """Bytes charged to it, less file pages nobody used lately: those the kernel gives back before it kills."""
        text = self._text("memory.usage_in_bytes", "memory.current").strip()
        if not text.isdigit():
            return None
        name = "total_inactive_file" if self.version == 1 else "inactive_file"
        return int(text) - (_field(self._text("memory.stat", "memory.stat"), name) or 0)

    @property
    def oom_kills(self) -> int | None:
        """Processes of it that the kernel killed for want of memory."""
        return _field(self._text("memory.oom_control", "memory.events"), "oom_kill")

    def _text(self, first: str, second: str) -> str:
        """The file of that name in version 1 or 2; empty where it cannot be read."""
        try:
            return (self.folder / (first if self.version == 1 else second)).read_text()
        except OSError:
            return ""


def oom_kills(root: Path = Path("/")) -> int:
    """Processes killed for want of memory so far in our control groups; on the whole machine where there are none.

    The kernel counts a victim in its own group, whichever limit was reached.
    """
    counts = [group.oom_kills for group in control_groups(root)]
    known = [count for count in counts if count is not None]
    if known:
        return sum(known)
    try:
        return _field((root / "proc/vmstat").read_text(), "oom_kill") or 0
    except OSError:
        return 0


def control_groups(root: Path = Path("/")) -> tuple[ControlGroup, ...]:
    """The memory control groups of this process, each with its ancestors; those that are not there left out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found: list[ControlGroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, version = root / "sys/fs/cgroup", 2
        elif "memory" in controllers.split(","):
            mount, version = root / "sys/fs/cgroup/memory", 1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's and not exist here: the mount's own limit then counts.
        folders = (mount / folder for folder in (group, *group.parents))
        found += [ControlGroup(folder, version) for folder in folders if folder.is_dir()]
    return tuple(found)


def _field(text: str, name: str) -> int | None:
    """The number of a line `name number`."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _meminfo(root: Path, name: str) -> int | None:
    """Bytes of one line of /proc/meminfo; None where there is none."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError):
        return None
