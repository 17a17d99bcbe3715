"""Watch a compile: its processes' memory, and whether it is still going.

A stall is no output and less than 1 % of one CPU over the whole process tree for a whole limit: a serial compile
was once seen to wait on a pipe for 25 minutes. It is ended with TERM, then KILL.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import psutil

Answer = TypeVar("Answer")
STANDARD_STREAMS = (1, 2)
IDLE_CPU_FRACTION = 0.01
POLL_SECONDS = 2.0
POLLS_A_LIMIT = 10
TERM_PATIENCE_SECONDS = 10.0
RETURN_PATIENCE_SECONDS = 10.0


class CompilerStalledError(Exception):
    """No output and no work for the limit; the processes were ended."""

    def __init__(self, seconds: float, ended: int) -> None:
        super().__init__(
            f"no output and under 1 % CPU for {seconds:.0f} s; {ended} processes ended"
        )
        self.seconds, self.ended = seconds, ended


@dataclass(slots=True)
class Watch(Generic[Answer]):
    """Runs one action in a thread and watches what it starts. `output`: a folder that grows while it works. What this
    process and all it starts print counts too, where it goes to files (a worker's log)."""

    output: Path
    stall_seconds: float
    peak_bytes: int = 0
    """Largest resident memory of this process and its descendants, summed, seen so far."""
    _answer: list[Answer] = field(default_factory=list)
    _error: list[BaseException] = field(default_factory=list)

    def run(self, action: Callable[[], Answer]) -> Answer:
        """The action's answer. Raises what it raised, or CompilerStalledError."""
        thread = threading.Thread(target=self._keep, args=(action,), daemon=True)
        thread.start()
        poll = min(POLL_SECONDS, self.stall_seconds / POLLS_A_LIMIT)
        seen_output, seen_cpu, since = self._written(), self._cpu(), time.monotonic()
        while thread.is_alive():
            thread.join(poll)
            self._measure()
            now, output, cpu = time.monotonic(), self._written(), self._cpu()
            # A descendant that ended takes its time with it: a smaller sum is a change, too.
            if (
                output != seen_output
                or abs(cpu - seen_cpu) >= IDLE_CPU_FRACTION * self.stall_seconds
            ):
                seen_output, seen_cpu, since = output, cpu, now
            elif now - since >= self.stall_seconds and thread.is_alive():
                ended = end_descendants()
                thread.join(RETURN_PATIENCE_SECONDS)
                raise CompilerStalledError(now - since, ended)
        if self._error:
            raise self._error[0]
        return self._answer[0]

    def _keep(self, action: Callable[[], Answer]) -> None:
        try:
            self._answer.append(action())
        except BaseException as error:
            self._error.append(error)

    def _written(self) -> tuple[int, float]:
        """Bytes and newest change of all files below `output` and of what is printed to files."""
        total, newest = 0, 0.0
        for found in (*map(_status, self.output.rglob("*")), *map(_status, STANDARD_STREAMS)):
            if found is not None:
                total, newest = total + found.st_size, max(newest, found.st_mtime)
        return total, newest

    def _cpu(self) -> float:
        """CPU seconds of this process without this thread, and of its descendants."""
        total = time.process_time() - time.thread_time()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _measure(self) -> None:
        own = psutil.Process()
        total = own.memory_info().rss
        for process in own.children(recursive=True):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        self.peak_bytes = max(self.peak_bytes, total)


def _status(place: Path | int) -> os.stat_result | None:
    """Of a file, or of a stream that goes to one."""
    with suppress(OSError):
        if isinstance(place, Path):
            return place.stat()
        found = os.fstat(place)
        if stat.S_ISREG(found.st_mode):
            return found
    return None


def end_descendants(patience: float = TERM_PATIENCE_SECONDS) -> int:
    """TERM to every descendant, KILL to those still there after `patience` seconds; how many there were."""
    found = psutil.Process().children(recursive=True)
    for process in found:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=patience)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=patience)
    return len(found)
