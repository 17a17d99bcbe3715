"""What a fine-tuning rank is called for: load, begin a generation, one step, save. Plain values cross.

torch and peft come with `replica`, which the workers' forkserver has loaded; the controller never does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.elastic.group import Meeting, gloo_group
from gemma_neuron.tuning.checkpoints import write_checkpoint
from gemma_neuron.tuning.parcel import Piece, pieces
from gemma_neuron.tuning.recipe import Recipe

if TYPE_CHECKING:
    from gemma_neuron.tuning.replica import Replica

LOAD_SECONDS = 1800.0
"""Silence allowed while weights are read: one call may hold the interpreter for the whole of a large file."""
OVER_SUFFIX = ".over"
WORK = "work"
"""Where a worker keeps its own, in its context's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a replica is made of. `samples`: what `sample_file` made, a file or its bytes; `device`: cpu or cuda."""

    model: Path
    samples: Path | bytes
    recipe: Recipe
    threads: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One group of replicas that work together until one of them is lost. `store`: one that no other group used.

    `checkpoint`: folder to begin from, or its files by name; None for the beginning. `timeout`: seconds a collective
    may take.
    """

    store: Path | Meeting
    rank: int
    world: int
    checkpoint: Path | Mapping[str, bytes] | None
    timeout: float

    def is_over(self) -> bool:
        """Whether a peer is known to be lost: a survivor leaves between two samples. On several machines, with no file
        to say so, it leaves at the next collective."""
        return isinstance(self.store, Path) and over(self.store).exists()


def over(store: Path) -> Path:
    """There once a peer of the group that met at `store` is lost."""
    return store.with_name(store.name + OVER_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step's mean loss over its learned tokens, and what it went over."""

    step: int
    loss: float
    samples: int
    tokens: int
    finite: bool
    """Whether the adapter still is numbers after it."""


@dataclass(slots=True)
class _Work:
    """A worker's state from call to call."""

    replica: Replica
    group: AbstractContextManager[None] | None = None
    generation: Generation | None = None
    writer: threading.Thread | None = None
    failure: list[Exception] | None = None
    packed: list[Piece] = field(default_factory=list)
    """What is left to hand over of a checkpoint that is not written here."""


def load(context: WorkerContext, job: Job) -> dict[str, Any]:
    """Read the model and put a fresh adapter on it; facts about it."""
    context.phase("loading the model", LOAD_SECONDS)
    from gemma_neuron.tuning.replica import Replica

    replica = Replica(job)
    context.state[WORK] = _Work(replica)
    return replica.facts()


def quiet(context: WorkerContext) -> None:
    """Leave the group and let a save in flight come to its end. Raises what the save raised."""
    work = context.state.get(WORK)
    if work is not None:
        _leave(work)
        _settle(work)


def begin(context: WorkerContext, generation: Generation) -> None:
    """Take up a checkpoint's state and join the generation's group. Raises CollectiveAborted."""
    context.phase("taking up the checkpoint")
    work: _Work = context.state[WORK]
    work.replica.restore(generation.checkpoint)
    group = gloo_group(generation.store, generation.rank, generation.world, generation.timeout)
    group.__enter__()
    work.group, work.generation = group, generation


def step(context: WorkerContext, number: int) -> StepDone:
    """One optimiser step together with the others. Raises CollectiveAborted when one of them is gone."""
    work: _Work = context.state[WORK]
    assert work.generation is not None
    _raise_failure(work)
    context.phase(f"computing step {number + 1}")
    rank, world = work.generation.rank, work.generation.world
    recipe, replica = work.replica.job.recipe, work.replica
    indexes = recipe.indexes(number)
    total = replica.new_total()
    with _leaving(work):
        for first in range(0, len(indexes), world):
            mine = first + rank
            vector = (
                replica.gradient(number, mine, indexes[mine])
                if mine < len(indexes)
                else replica.new_total()
            )
            with _collective(work):
                parts = replica.gather(vector, world)
            for part in parts[: len(indexes) - first]:
                total += part
    loss, tokens = replica.apply(number, total, indexes)
    finite = replica.is_finite()
    return StepDone(step=number, loss=loss, samples=len(indexes), tokens=tokens, finite=finite)


def save(
    context: WorkerContext, folder: Path | None, facts: dict[str, Any], wait: bool = False
) -> tuple[str, int]:
    """Commit the state of now as `folder` (None: pack it, to be handed over), in the background unless `wait`; only
    rank 0 does.

    The digest of the adapter's bytes, which is every rank's or something is very wrong, and the peak resident bytes.
    """
    work: _Work = context.state[WORK]
    assert work.generation is not None
    _settle(work)
    if work.generation.rank == 0:
        files = work.replica.state()
        work.writer = threading.Thread(
            target=_write, args=(work, folder, files, facts), name="checkpoint"
        )
        work.writer.start()
        if wait:
            _settle(work)
    return work.replica.digest(), _peak_bytes()


def adapter_config(context: WorkerContext) -> dict[str, Any]:
    """peft's own record of the adapter."""
    work: _Work = context.state[WORK]
    return work.replica.adapter_config()


def hand_over(context: WorkerContext, wait: bool) -> tuple[Piece | None, int]:
    """The next piece of the packed checkpoint, None while it is being packed unless `wait`; how many are left then."""
    work: _Work = context.state[WORK]
    if work.writer is not None and work.writer.is_alive() and not wait:
        return None, 0
    _settle(work)
    return work.packed.pop(0), len(work.packed)


def _write(work: _Work, folder: Path | None, files: Any, facts: dict[str, Any]) -> None:
    try:
        if folder is None:
            work.packed = list(pieces(files()))
        else:
            write_checkpoint(folder, files(), facts)
    except Exception as error:
        work.failure = [error]


def _settle(work: _Work) -> None:
    if work.writer is not None:
        work.writer.join()
        work.writer = None
    _raise_failure(work)


def _raise_failure(work: _Work) -> None:
    if work.failure:
        raise work.failure.pop()


def _leave(work: _Work) -> None:
    group, work.group = work.group, None
    if group is not None:
        group.__exit__(None, None, None)


@contextmanager
def _leaving(work: _Work) -> Iterator[None]:
    """Whatever ends the block early takes this rank out of its group, so that nobody waits for it."""
    try:
        yield
    except BaseException:
        _leave(work)
        raise


@contextmanager
def _collective(work: _Work) -> Iterator[None]:
    """Around a collective alone: a RuntimeError in it is a lost peer, and the group is left at once."""
    assert work.generation is not None
    try:
        if work.generation.is_over():
            raise RuntimeError("a peer was lost")
        yield
    except RuntimeError as error:
        group, work.group = work.group, None
        assert group is not None
        group.__exit__(type(error), error, error.__traceback__)  # raises CollectiveAborted
        raise


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
