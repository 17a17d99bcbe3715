"""Where `tune` has its replicas: on this machine, or on those of a Ray cluster, which share no disk with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.artifacts import write_atomic
from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.tuning.record import SAMPLES, SCRATCH, RunRecord

if TYPE_CHECKING:
    from gemma_neuron.checkpoint.audit import Audit
    from gemma_neuron.checkpoint.source import Source
    from gemma_neuron.elastic.cluster import RayEngine
    from gemma_neuron.tuning.plan import Supervision
    from gemma_neuron.tuning.recipe import Recipe
    from gemma_neuron.tuning.site import Site

WORKERS_SIDE = "gemma_neuron.pipeline.replica_away"
"""Named, not imported: a run on this machine needs nothing of it."""
BYTES = {"float32": 4, "bfloat16": 2}


@contextmanager
def joined(address: str | None) -> Iterator[RayEngine | None]:
    """The cluster at `address`, joined within the block; None without one. Raises what `RayEngine` raises."""
    if address is None:
        yield None
        return
    from gemma_neuron.elastic.cluster import RayEngine
    from gemma_neuron.tuning.replicas import PRELOAD

    engine = RayEngine(address, PRELOAD, calls=[WORKERS_SIDE])
    try:
        yield engine
    finally:
        engine.close()


def here(model: Path, samples: bytes, out: Path) -> Site:
    """This machine's site for the run in `out`."""
    from gemma_neuron.tuning.site import OneMachine

    scratch = out / SCRATCH
    write_atomic(scratch / SAMPLES, samples)
    return OneMachine(model, scratch / SAMPLES, scratch)


def elsewhere(engine: RayEngine, source: Source, record: RunRecord, samples: bytes) -> Site:
    """A cluster's site for the run of `record`."""
    from gemma_neuron.pipeline.replica_away import Origin, load_away
    from gemma_neuron.tuning.machines import Machines

    text = str(source.folder) if source.kind == "folder" else str(source)
    load = partial(load_away, Origin(text=text, digest=record.base))
    return Machines(engine, load, samples, record.versions)


def require_room(
    engine: RayEngine,
    audit: Audit,
    asked: Supervision,
    recipe: Recipe,
    notice: Callable[[str], None],
) -> None:
    """Tell the engine what a replica takes at least. Raises DoesNotFitError where no machine has so much."""
    count = sum(math.prod(spec.shape) for spec in audit.table or ())
    engine.memory = 0 if asked.device == "cuda" else count * BYTES[recipe.dtype]
    places = engine.places()
    if not places:
        raise DoesNotFitError(
            f"No machine of the cluster has {engine.cpus:g} CPU, {engine.gpus} GPU and {engine.memory:,} bytes of "
            "memory, which is the least that a replica takes.",
            "`ray status` shows what they have; --threads says how many CPUs a replica takes.",
        )
    if places < asked.replicas:
        notice(f"the cluster has room for {places} of {asked.replicas} replicas")
