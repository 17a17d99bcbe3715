"""Stand-in units for the schedule: what each try of one does is told beforehand, and really happens."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.errors import CompileError, CompilerFaultError

SILENCE = 2.5
"""Seconds without a heartbeat that count as hung here."""
PIECE_MIB = 4


@dataclass(frozen=True)
class Unit:
    """`tries`: what the first, the second, … try does; the last holds for all that follow."""

    folder: Path
    name: str
    tries: tuple[str, ...] = ("",)
    silence: float = SILENCE

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def starts(self) -> int:
        path = self.folder / f"{self.name}.starts"
        return len(path.read_text()) if path.is_file() else 0


def build(context: WorkerContext, unit: Unit) -> str:
    """One try; the unit's name when it comes to an end."""
    before = unit.starts
    with (unit.folder / f"{unit.name}.starts").open("a") as file:
        file.write("x")
    context.phase("compiling", unit.silence)
    for step in unit.tries[min(before, len(unit.tries) - 1)].split("; "):
        what, _, amount = step.partition(" ")
        if what == "after":
            _wait_for(unit.folder / f"{amount}.starts")
        else:
            _do(what, amount)
    return unit.name


def _do(what: str, amount: str) -> None:
    if what == "sleep":
        time.sleep(float(amount))
    elif what == "signal":
        os.kill(os.getpid(), signal.Signals[amount])
        time.sleep(60)
    elif what == "exit":
        os._exit(int(amount))
    elif what == "crash":
        of_memory = amount == "killed"
        raise CompilerFaultError(f"It {amount}.", "Wait.", signature=amount, of_memory=of_memory)
    elif what == "allocate":
        _allocate(*map(float, amount.split()))
    elif what == "refuse":
        error = CompileError(f"The graph is {amount}.", "Take another.")
        error.add_note(f"printed elsewhere: {amount}")
        raise error
    elif what == "break":
        raise ValueError(amount)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _allocate(mib: float, rate: float, seconds: float) -> None:
    """Take so many MiB, so many a second, and hold them for some seconds."""
    held = []
    for _ in range(int(mib / PIECE_MIB)):
        held.append(bytearray(os.urandom(1)) * (PIECE_MIB << 20))
        time.sleep(PIECE_MIB / rate)
    time.sleep(seconds)
