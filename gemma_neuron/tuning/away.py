"""A replica on a machine that shares no disk with the controller's: what its worker is called for besides.

Samples and checkpoints come in pieces and are never on this machine's disk: what a killed worker had, nobody has to
clean up.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.elastic.alike import require_alike
from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.elastic.group import hosted_store, use_address
from gemma_neuron.tuning import worker
from gemma_neuron.tuning.numerics import numerics, versions
from gemma_neuron.tuning.parcel import Parcel, Piece
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.record import SAMPLES

if TYPE_CHECKING:
    from gemma_neuron.tuning.replica import Replica

PARCEL, STORE = "parcel", "store"
"""Kept in a worker's state: what has come so far, and the store the others meet at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a replica elsewhere is made of, its model and samples left out. `versions`: the controller's packages."""

    recipe: Recipe
    threads: int
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A replica that is ready. `base`: digest of its base's tensors as loaded; `machine`: its name."""

    facts: dict[str, Any]
    machine: str
    base: str
    numerics: dict[str, str]


def clear(context: WorkerContext) -> None:
    """`worker.quiet`, and nothing has come yet."""
    context.state.pop(PARCEL, None)
    worker.quiet(context)


def receive(context: WorkerContext, piece: Piece) -> None:
    """Take a piece of a file."""
    context.state.setdefault(PARCEL, Parcel()).add(piece)


def _received(context: WorkerContext) -> dict[str, bytes]:
    parcel: Parcel = context.state.pop(PARCEL, Parcel())
    return parcel.files()


def require_same_versions(there: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem where this machine's packages are not those of the controller's: sums come out
    otherwise, and a model may be another."""
    otherwise = f"{platform.node()} would train otherwise than the controller's machine"
    require_alike(otherwise, versions(), there)


def load(context: WorkerContext, model: Path, order: Order) -> Arrived:
    """Make the replica of the samples that have come and the model in `model`, a folder of this machine."""
    job = worker.Job(
        model=model,
        samples=_received(context)[SAMPLES],
        recipe=order.recipe,
        threads=order.threads,
        device=order.device,
    )
    facts = worker.load(context, job)
    replica: Replica = context.state[worker.WORK].replica
    return Arrived(
        facts=facts,
        machine=platform.node(),
        base=replica.base_digest(),
        numerics=numerics(order.device),
    )


def host(context: WorkerContext, address: str) -> int:
    """Open a store for a group to meet at; its port. `address`: this machine's, as the others reach it."""
    context.state[STORE] = store = hosted_store(address)
    return int(store.port)


def begin(context: WorkerContext, generation: worker.Generation, address: str) -> None:
    """`worker.begin`, from the checkpoint that has come. Raises CollectiveAborted."""
    use_address(address)
    worker.begin(context, replace(generation, checkpoint=_received(context) or None))
