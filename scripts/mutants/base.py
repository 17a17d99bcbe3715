"""What a fault is: one change to a port's graphs, weights or prompt files, made before anything was committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest import MonkeyPatch

if TYPE_CHECKING:
    from gemma_neuron.port import Port

Kind = Literal["graph", "weights", "prompt"]
GraphFault = Callable[[MonkeyPatch, "Port"], None]
"""Changes the model code for the time a port is loaded and run; may change the runner's own copy of the geometry."""
FileFault = Callable[["Port"], None]
"""Changes files of a port that nobody else uses; the set they belong to is committed again afterwards."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`families`: those the fault exists in."""

    name: str
    kind: Kind
    apply: GraphFault | FileFault
    families: tuple[str, ...] = ("gemma3", "gemma4")


FAULTS: dict[str, Fault] = {}


def graph(name: str, *families: str) -> Callable[[GraphFault], GraphFault]:
    return _registered(name, "graph", families)


def weights(name: str, *families: str) -> Callable[[FileFault], FileFault]:
    return _registered(name, "weights", families)


def prompt(name: str, *families: str) -> Callable[[FileFault], FileFault]:
    return _registered(name, "prompt", families or ("gemma4",))


def _registered(name: str, kind: Kind, families: tuple[str, ...]) -> Callable[[Any], Any]:
    def keep(apply: Any) -> Any:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, kind, apply, families or ("gemma3", "gemma4"))
        return apply

    return keep


def built_with(port: Port, **changes: Any) -> None:
    """The runner is built from another geometry than the checkpoint has."""
    port.__dict__["geometry"] = replace(port.geometry, **changes)
