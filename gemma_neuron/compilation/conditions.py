"""Whether another unit may be started now, and when a running one has to stop: the host's memory, and notices.

Units are admitted by predicted peak. What they really take is watched by the process tree's proportional size and by
what the control groups say, whatever else runs in them: nearing the budget nothing is admitted, nearer the youngest
unit has to stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gemma_neuron import machine
from gemma_neuron.elastic.memory import proportional_bytes, resident_bytes, tree
from gemma_neuron.elastic.notice import Notices
from gemma_neuron.errors import DoesNotFitError

PAUSE_SHARE, STOP_SHARE = 0.85, 0.95
"""Of the budget, or of a control group's limit. The last 5 % are what a unit may add between two looks."""
LOOK_SECONDS, GLANCE_SECONDS, CLOSE_LOOK_SECONDS = 1.0, 0.1, 0.02
"""How often memory is measured exactly, how often by resident sizes less what was shared when that was measured (a
millisecond's work), and how often so with the budget near."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a schedule goes by. `long`: units that take longer than a notice lasts, as far as is known."""

    memory: Memory
    notices: Notices
    long: frozenset[str] = frozenset()

    def puts_off(self, name: str) -> bool:
        """Whether the unit is too long to be started while the machine may be taken away."""
        return self.notices.cautious and name in self.long


class RunningUnit(Protocol):
    """One try of a unit, as memory sees it. `peak_bytes` is kept up here."""

    peak_bytes: int

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def since(self) -> float: ...


class Memory(Protocol):
    """What a schedule asks of memory. `budget_bytes`: what one unit alone may take."""

    total_bytes: int
    peak_bytes: int

    @property
    def budget_bytes(self) -> int: ...
    @property
    def poll_seconds(self) -> float: ...
    def admits(self, name: str, running: Sequence[RunningUnit]) -> bool: ...
    def watch(self, running: Sequence[RunningUnit]) -> bool: ...
    def took_more(self, unit: RunningUnit) -> None: ...
    def killed_by_kernel(self) -> bool: ...
    def refusal(self, unit: RunningUnit, how: str) -> DoesNotFitError: ...


class HostMemory:
    """The budget's side of a schedule. `predicted`: unit → peak of its worker and all it starts, in bytes."""

    def __init__(
        self,
        budget: machine.HostBudget,
        predicted: dict[str, int],
        oom_kills: Callable[[], int] = machine.oom_kills,
        groups: Sequence[machine.ControlGroup] | None = None,
    ) -> None:
        self.budget, self._predicted, self._oom_kills = budget, dict(predicted), oom_kills
        found = machine.control_groups() if groups is None else groups
        self._groups = [(group, group.limit) for group in found if group.limit is not None]
        self._killed = oom_kills()
        self._looked = 0.0
        self.total_bytes = self.peak_bytes = self._base_bytes = self._shared_bytes = 0
        self.level = 0.0

    @property
    def budget_bytes(self) -> int:
        return self.budget.bytes

    @property
    def poll_seconds(self) -> float:
        return CLOSE_LOOK_SECONDS if self.level > PAUSE_SHARE else GLANCE_SECONDS

    def admits(self, name: str, running: Sequence[RunningUnit]) -> bool:
        """Whether one more fits beside these. The first always does: what cannot fit alone was refused before."""
        if not running:
            return True
        held = sum(max(self._predicted.get(unit.name, 0), unit.peak_bytes) for unit in running)
        wanted = self._base_bytes + held + self._predicted.get(name, 0)
        return self.level < PAUSE_SHARE and wanted <= self.budget.bytes

    def watch(self, running: Sequence[RunningUnit]) -> bool:
        """Measure; whether a unit has to stop: the youngest of several, or one that alone is past the budget."""
        resident = sum(map(resident_bytes, tree([os.getpid()])))
        self._rate(resident - self._shared_bytes)
        late = time.monotonic() - self._looked > LOOK_SECONDS
        if not late and not self._over(len(running)):
            return False
        # Pages shared by a worker that is new here were counted twice: look exactly before anything is stopped.
        self._measure(running)
        return self._over(len(running))

    def _over(self, running: int) -> bool:
        if running == 1:
            return self.total_bytes > self.budget.bytes
        return running > 1 and self.level > STOP_SHARE

    def _measure(self, running: Sequence[RunningUnit]) -> None:
        members = list(tree([os.getpid()]))
        resident = sum(map(resident_bytes, members))
        sizes = {pid: proportional_bytes(pid) for pid in members}
        held = 0
        for unit in running:
            taken = sum(sizes.get(pid, 0) for pid in tree([unit.pid]))
            unit.peak_bytes = max(unit.peak_bytes, taken)
            held += taken
        total = sum(sizes.values())
        self._base_bytes, self._shared_bytes = total - held, max(0, resident - total)
        self._rate(total)
        self.peak_bytes = max(self.peak_bytes, total)
        self._looked = time.monotonic()

    def _rate(self, total: int) -> None:
        self.total_bytes = total
        self.level = max(total / self.budget.bytes, self._filled())

    def _filled(self) -> float:
        """The fullest of the control groups that have a limit, as a share of it."""
        return max(((group.used or 0) / limit for group, limit in self._groups), default=0.0)

    def took_more(self, unit: RunningUnit) -> None:
        """What the prediction learns from a unit that was stopped: it wants more than it had by then."""
        known = self._predicted.get(unit.name, 0)
        self._predicted[unit.name] = max(known, int(1.1 * unit.peak_bytes))

    def killed_by_kernel(self) -> bool:
        """Whether the kernel killed something for want of memory since this was last asked."""
        before, self._killed = self._killed, self._oom_kills()
        return self._killed > before

    def refusal(self, unit: RunningUnit, how: str) -> DoesNotFitError:
        """The error for a unit that does not fit even alone."""
        return DoesNotFitError(
            f"Compiling {unit.name} alone took {unit.peak_bytes:,} bytes of host memory, {self.peak_bytes:,} with the "
            f"process that watches it, when it was {how}; {self.budget.bytes:,} may be used ({self.budget.origin}).",
            "Leave out the longer --buckets, or compile on a host with more memory and say so by --host-memory.",
        )


class Elsewhere:
    """Memory of other machines. Their cluster admits a worker by what it asks for, and counts; none of it is measured
    here. `places`: how many workers there is room for in all, now."""

    total_bytes = peak_bytes = 0
    poll_seconds = 1.0

    def __init__(self, places: Callable[[], int], budget_bytes: int) -> None:
        self._places, self.budget_bytes = places, budget_bytes

    def admits(self, name: str, running: Sequence[RunningUnit]) -> bool:
        """The first always: whether there is any place at all is for the cluster to say, with an error."""
        return not running or len(running) < self._places()

    def watch(self, running: Sequence[RunningUnit]) -> bool:
        return False

    def took_more(self, unit: RunningUnit) -> None:
        """Nothing to learn: what a unit had taken by then is not known here."""

    def killed_by_kernel(self) -> bool:
        return False

    def refusal(self, unit: RunningUnit, how: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"Compiling {unit.name} alone on a machine of the cluster took more host memory than there was: it "
            f"was {how}; {self.budget_bytes:,} bytes had been asked for.",
            "Leave out the longer --buckets, or add a machine with more memory.",
        )
