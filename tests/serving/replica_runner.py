"""Fake runners for replicas: made in their own processes, by a name that can be sent there."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_neuron.errors import CompileError
from tests.serving.fake_runner import FakeRunner, Floats


class Poisoned(FakeRunner):
    """Fails as soon as a slot holds `poison`."""

    def __init__(self, poison: int, **options: Any) -> None:
        super().__init__(**options)
        self._poison = poison

    def _logits(self, slot: int) -> Floats:
        if self._poison in self._history[slot]:
            raise RuntimeError("device lost")
        return super()._logits(slot)


class Holding(FakeRunner):
    """As the cpu back end's graphs do: no other thread of the process runs during a step."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds

    def _begin(self, name: str, size: int) -> None:
        super()._begin(name, size)
        ctypes.PyDLL(None).usleep(int(self._seconds * 1e6))


class Closing(FakeRunner):
    """Leaves a file when it is closed."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(**options)
        self._path = path

    def close(self) -> None:
        super().close()
        self._path.touch()


def make(
    index: int,
    *,
    step: float = 0.0,
    load: float = 0.0,
    broken: bool = False,
    script: Sequence[int] = (),
    slots: int = 4,
    context: int = 256,
    poison: int | None = None,
    closes: Path | None = None,
    holds: float = 0.0,
    lingers: bool = False,
) -> FakeRunner:
    """A `LoadRunner` behind `functools.partial`."""
    time.sleep(load)
    if broken:
        raise CompileError("The graph is of another machine.", "Compile again.")
    if lingers and index == 0:  # its process does not end by itself
        threading.Thread(target=time.sleep, args=(120,), daemon=False).start()
    if holds:
        return Holding(holds)
    if closes is not None:
        return Closing(closes)
    if poison is not None and not (lingers and index):
        return Poisoned(poison, step_seconds=step, slots=slots, max_context=context)
    return FakeRunner(script=script, step_seconds=step, slots=slots, max_context=context)
