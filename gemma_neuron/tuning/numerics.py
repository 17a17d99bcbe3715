"""What decides how a replica's floating-point sums come out, as far as it is known."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

from gemma_neuron import __version__, machine
from gemma_neuron.elastic.events import EventLog

PACKAGES = ("torch", "transformers", "peft")


def numerics(device: str) -> dict[str, str]:
    """Of a replica on this machine."""
    return {
        "device": device,
        "cpu": machine.cpu_capability(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }


def together(each: Sequence[dict[str, str]]) -> dict[str, str]:
    """Of several replicas: what they have in common, and all values of what they have not."""
    return {
        name: " and ".join(sorted({numbers[name] for numbers in each}))
        for name in (each[0] if each else {})
    }


def versions() -> dict[str, str]:
    """Of the toolkit and what it trains with; "none" for a package that is not installed."""
    return {"gemma-neuron": __version__, **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Sameness:
    """Says where a run's sums come out otherwise than those before, or differ between its replicas."""

    def __init__(self, events: EventLog, tell: Callable[[str], None]) -> None:
        self._events, self._tell = events, tell
        self._what = ""
        self._before: dict[str, str] | None = None

    def begin(self, step: int, before: dict[str, str]) -> None:
        """The run goes on from a step that was computed with `before`."""
        self._what, self._before = f"step {step}", before

    def look(self, each: Sequence[dict[str, str]]) -> None:
        """The replicas' own, empty while not known."""
        if not each:
            return
        now = together(each)
        before = each[0] if self._before is None else self._before
        what, self._what, self._before = self._what, "what came before", now
        differing = [name for name in now if before.get(name) != now[name]]
        if not differing:
            return
        had = ", ".join(f"{name} {before.get(name)}" for name in differing)
        new = ", ".join(f"{name} {now[name]}" for name in differing)
        self._events.emit("numerics_changed", before=had, now=new)
        why = (
            f"{what} was computed with {had}; here it is {new}" if what else f"replicas have {new}"
        )
        self._tell(
            f"warning: {why}. The run goes on, and need not end bit-equal to an undisturbed one."
        )
