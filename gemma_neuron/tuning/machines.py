"""Replicas on the machines of a cluster, which share no disk with this one: `Site` over `away`'s calls.

Samples and checkpoints go to the workers, and each checkpoint comes home from rank 0, in pieces between two steps; only
this process writes it. So what is acknowledged is on this disk, whatever becomes of the machine that computed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gemma_neuron.elastic.engine import Engine, WorkerHandle
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.group import Meeting
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.elastic.room import Room
from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.tuning import away, worker
from gemma_neuron.tuning.checkpoints import ADAPTER_FILE, TRAINING_FILE, write_checkpoint
from gemma_neuron.tuning.fleet import Fleet
from gemma_neuron.tuning.parcel import Parcel, Piece, pieces
from gemma_neuron.tuning.plan import Supervision
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.record import SAMPLES
from gemma_neuron.tuning.replicas import specs
from gemma_neuron.tuning.site import Workers

RESTORED = (ADAPTER_FILE, TRAINING_FILE)
"""The files of a checkpoint that a replica takes up."""
Load = Callable[..., away.Arrived]
"""Called in a worker with its context and an `away.Order`: finds the model there, and ends in `away.load`."""


class Reachable(Engine, Protocol):
    """An engine whose workers may be on several machines, such as `elastic.cluster.RayEngine`."""

    room: Room

    def address(self, handle: WorkerHandle) -> str:
        """Of the machine a worker is on, as the others reach it."""


@dataclass(slots=True)
class _Return:
    """A checkpoint on its way home from `packer`."""

    packer: WorkerHandle
    folder: Path
    facts: dict[str, Any]
    parcel: Parcel = field(default_factory=Parcel)


class Machines:
    """`Site` on the cluster that `engine` has joined. `versions`: of this machine's packages."""

    fleet: Fleet

    def __init__(
        self, engine: Reachable, load: Load, samples: bytes, versions: Mapping[str, str]
    ) -> None:
        self._engine, self._load, self._samples = engine, load, samples
        self._versions = versions
        self._arrived: dict[WorkerHandle, away.Arrived] = {}
        self._base: away.Arrived | None = None
        """Whose base all others must have."""
        self._return: _Return | None = None
        self._writer: threading.Thread | None = None
        self._failure: list[Exception] = []

    @property
    def numerics(self) -> Sequence[dict[str, str]]:
        return [found.numerics for found in self._arrived.values()]

    def opened(self, asked: Supervision, events: EventLog, idle: Callable[[], None]) -> Manager:
        """See `Site`. Where the run goes on without a replica, its place stays empty for a while."""
        self._device = asked.device
        self._engine.room = Room(asked.replicas, asked.empty_seconds)
        self.fleet = Fleet(self._engine, idle)
        return Manager(self._engine, specs(asked, choose_device=False), events)

    def settle(self, workers: Workers) -> None:
        """See `Site`. A checkpoint whose packer lives comes home yet."""
        self._arrived = {h: arrived for h, arrived in self._arrived.items() if h in workers}
        self.fleet.ask(workers, away.clear)
        if self._return is not None and self._return.packer in workers:
            self.collect(wait=True)
        self._return = None
        self._written()

    def load(
        self, workers: Workers, recipe: Recipe, threads: int, meanwhile: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """See `Site`. Raises EnvironmentProblem where a machine has another model or other packages."""
        order = away.Order(
            recipe=recipe, threads=threads, device=self._device, versions=self._versions
        )
        self._send(workers, pieces({SAMPLES: self._samples}))
        found = self.fleet.ask(workers, self._load, lambda _: (order,), meanwhile)
        for arrived in found:
            self._require_same_base(arrived)
        self._arrived |= dict(zip(workers, found, strict=True))
        return [arrived.facts for arrived in found]

    def _require_same_base(self, arrived: away.Arrived) -> None:
        first = self._base = self._base or arrived
        if arrived.base != first.base:
            raise EnvironmentProblem(
                f"The model on {arrived.machine} has other weights than that on {first.machine}: {arrived.base[:16]} "
                f"there, {first.base[:16]} here.",
                "Put the same checkpoint on all machines of the cluster.",
            )

    def begin(self, workers: Workers, checkpoint: Path | None, timeout: float) -> None:
        if checkpoint is not None:
            files = {name: (checkpoint / name).read_bytes() for name in RESTORED}
            self._send(workers, pieces(files))
        addresses = [self._engine.address(handle) for handle in workers]
        (port,) = self.fleet.ask(workers[:1], away.host, lambda _: (addresses[0],))
        self.fleet.ask(
            workers,
            away.begin,
            lambda position: (
                worker.Generation(
                    store=Meeting(addresses[0], port),
                    rank=position,
                    world=len(workers),
                    checkpoint=None,
                    timeout=timeout,
                ),
                addresses[position],
            ),
        )

    def _send(self, workers: Workers, sent: Iterable[Piece]) -> None:
        for piece in sent:
            self.fleet.ask(workers, away.receive, partial(_same, piece))

    def save(
        self, workers: Workers, folder: Path, facts: dict[str, Any], wait: bool
    ) -> list[tuple[str, int]]:
        answers = self.fleet.ask(workers, worker.save, lambda _: (None, {}, wait))
        self._return = _Return(workers[0], folder, facts)
        if wait:
            self.collect(wait=True)
        return answers

    def collect(self, *, wait: bool = False) -> None:
        """See `Site`."""
        self._raise_failure()
        self._bring(wait=wait)
        if wait:
            self._written()

    def _bring(self, *, wait: bool) -> None:
        """Take what is packed, and write it beside the work once it is whole here."""
        if self._return is None:
            return
        coming = self._return
        while True:
            ((piece, left),) = self.fleet.ask([coming.packer], worker.hand_over, lambda _: (wait,))
            if piece is None:
                return
            coming.parcel.add(piece)
            if not left:
                break
        self._return = None
        self._writer = threading.Thread(target=self._write, args=(coming,), name="checkpoint")
        self._writer.start()

    def _write(self, whole: _Return) -> None:
        try:
            write_checkpoint(whole.folder, whole.parcel.files(), whole.facts)
        except Exception as error:
            self._failure.append(error)

    def _written(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure.pop()

    def close(self) -> None:
        """See `Site`."""
        if self._writer is not None:
            self._writer.join()

    def lost(self) -> None:
        """See `Site`: survivors leave by their closed sockets, and at the latest when the manager ends them."""


def _same(piece: Piece, position: int) -> tuple[Piece]:
    """The arguments of a call that are everyone's."""
    return (piece,)
