"""Where the replicas of a run are, and what that decides: how model, samples and checkpoints come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerHandle
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.errors import SourceChangedError
from gemma_neuron.tuning import worker
from gemma_neuron.tuning.fleet import Fleet
from gemma_neuron.tuning.numerics import numerics
from gemma_neuron.tuning.plan import Supervision
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.replicas import PRELOAD, specs
from gemma_neuron.unchanged import FilesBefore

Workers = Sequence[WorkerHandle]


class Site(Protocol):
    """The controller's view. `fleet` is there once it is open; all of it can raise what `Fleet.ask` raises."""

    fleet: Fleet

    @property
    def numerics(self) -> Sequence[dict[str, str]]:
        """Of each replica, or once where all are on one machine; empty while not known."""

    def opened(self, asked: Supervision, events: EventLog, idle: Callable[[], None]) -> Manager:
        """The manager of the replicas. `idle`: called while answers are waited for."""

    def settle(self, workers: Workers) -> None:
        """Let all leave what they were in, and a checkpoint that is being written come to its end, if it can."""

    def load(
        self, workers: Workers, recipe: Recipe, threads: int, meanwhile: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Give new replicas the model; facts about each."""

    def begin(self, workers: Workers, checkpoint: Path | None, timeout: float) -> None:
        """Give all the state of a checkpoint on this machine, None being the beginning, and a new group."""

    def save(
        self, workers: Workers, folder: Path, facts: dict[str, Any], wait: bool
    ) -> list[tuple[str, int]]:
        """Have the state of now committed as `folder` of this machine, in the background unless `wait`. For each
        replica the digest of its adapter, and its peak resident bytes."""

    def collect(self, *, wait: bool = False) -> None:
        """Go on with a checkpoint that is under way from another machine, to its end if `wait`. Raises what writing it
        raised."""

    def lost(self) -> None:
        """A replica is lost: those of its group are to leave."""

    def close(self) -> None:
        """All replicas have ended: nothing is written after this."""


class OneMachine:
    """`Site` on this machine. `scratch`: folder for what lives as long as this process."""

    fleet: Fleet

    def __init__(self, model: Path, samples: Path, scratch: Path) -> None:
        self._model, self._samples, self._scratch = model, samples, scratch
        self._generation = 0
        self._store: Path | None = None
        self._before = FilesBefore.of([model / "config.json", *sorted(model.glob("*.safetensors"))])

    @property
    def numerics(self) -> Sequence[dict[str, str]]:
        return [self._numerics]

    def opened(self, asked: Supervision, events: EventLog, idle: Callable[[], None]) -> Manager:
        """See `Site`. Where the run goes on without a replica, its place stays empty for a while."""
        self._device, self._numerics = asked.device, numerics(asked.device)
        engine = EmbeddedEngine(PRELOAD, asked.replicas, asked.empty_seconds)
        self.fleet = Fleet(engine, idle)
        return Manager(engine, specs(asked), events)

    def settle(self, workers: Workers) -> None:
        self.fleet.ask(workers, worker.quiet)

    def load(
        self, workers: Workers, recipe: Recipe, threads: int, meanwhile: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """See `Site`. Raises SourceChangedError: replicas of two models would sum gradients of both."""
        job = worker.Job(
            model=self._model,
            samples=self._samples,
            recipe=recipe,
            threads=threads,
            device=self._device,
        )
        facts = self.fleet.ask(workers, worker.load, lambda _: (job,), meanwhile)
        if changed := self._before.changed():
            raise SourceChangedError(
                f"{changed} What is committed was computed with what it was before.",
                "Put the model back as it was and run the same command, or name a new --out.",
            )
        return facts

    def begin(self, workers: Workers, checkpoint: Path | None, timeout: float) -> None:
        store = self._store = self._scratch / f"group-{self._generation}"
        self._generation += 1
        self.fleet.ask(
            workers,
            worker.begin,
            lambda position: (
                worker.Generation(
                    store=store,
                    rank=position,
                    world=len(workers),
                    checkpoint=checkpoint,
                    timeout=timeout,
                ),
            ),
        )

    def save(
        self, workers: Workers, folder: Path, facts: dict[str, Any], wait: bool
    ) -> list[tuple[str, int]]:
        return self.fleet.ask(workers, worker.save, lambda _: (folder, facts, wait))

    def collect(self, *, wait: bool = False) -> None:
        """See `Site`: none comes from elsewhere. Rank 0 writes by itself, and says at the next step what went wrong."""

    def lost(self) -> None:
        if self._store is not None:
            worker.over(self._store).touch()

    def close(self) -> None:
        """See `Site`: who wrote has ended."""
