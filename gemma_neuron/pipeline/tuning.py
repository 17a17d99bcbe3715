"""`tune`: what is asked for made into one run; what can be refused is refused before weights are fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.artifacts import append_json_line, digest_bytes, digest_file
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.metadata import InstanceMetadata
from gemma_neuron.elastic.notice import Notices
from gemma_neuron.errors import UsageError
from gemma_neuron.pipeline.depot import CheckpointDepot
from gemma_neuron.pipeline.flushing import flushed
from gemma_neuron.pipeline.locking import locked
from gemma_neuron.pipeline.sites import elsewhere, here, joined, require_room
from gemma_neuron.pipeline.sources import UNWATCHED, Watch, examined, fetch, open_any
from gemma_neuron.pipeline.supervision import supervision
from gemma_neuron.tuning.plan import ElasticMode, Progress, Surroundings, Tuned
from gemma_neuron.tuning.recipe import PROJECTIONS, Recipe

if TYPE_CHECKING:
    from gemma_neuron.elastic.cluster import RayEngine
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.tuning.record import RunRecord

Notice = Callable[[str], None]
Look = Callable[[Progress], None]
LONGEST = 2048
"""Tokens of a sample where --max-length says nothing; the model's own limit may be lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What `tune` was asked for. Times in seconds; None is a default that depends on model or machine."""

    data: Path
    out: Path
    replicas: int | None = None
    threads: int | None = None
    device: str = "auto"
    epochs: float = 3.0
    steps: int | None = None
    batch: int = 8
    learning_rate: float = 2e-4
    rank: int = 8
    alpha: int | None = None
    targets: tuple[str, ...] = PROJECTIONS
    dropout: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    max_length: int | None = None
    save_every: int = 20
    keep: int = 3
    elastic: ElasticMode = "pause"
    min_replicas: int | None = None
    regrow_after: float = 10.0
    hang_after: float = 10.0
    max_failures: int = 10
    wait_for: float = 300.0
    cluster: str | None = None
    """Address of a Ray cluster whose machines the replicas are on; None is this machine."""
    mirror: MirrorOptions | None = None


def tuned(
    source_text: str,
    request: TuneRequest,
    *,
    notice: Notice,
    reading: Notice = lambda _: None,
    look: Look = lambda _: None,
    watch: Watch = UNWATCHED,
) -> Tuned:
    """Train an adapter, or go on with one. `reading`, `look`: progress through the data, and of the training.

    Raises UsageError (DataError for the data), what a source can raise, what `RayEngine` raises, and what `Tuning.run`
    raises.
    """
    with Notices(InstanceMetadata.here(), notice) as notices, joined(request.cluster) as engine:
        told = Told(notice, reading, look, watch)
        return _tuned(source_text, request, engine, told, notices)


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told what; see `tuned`."""

    notice: Notice
    reading: Notice
    look: Look
    watch: Watch


def _tuned(
    source_text: str,
    request: TuneRequest,
    engine: RayEngine | None,
    told: Told,
    notices: Notices,
) -> Tuned:
    from gemma_neuron.tuning.published import published
    from gemma_neuron.tuning.record import (
        EVENTS_NAME,
        LOCK_NAME,
        open_folder,
        require_own,
        require_same,
    )
    from gemma_neuron.tuning.run import Tuning

    notice, out = told.notice, request.out
    asked = supervision(request, notice, engine)
    require_own(out)
    source = open_any(source_text, told.watch)
    audit = examined(source)
    record, samples = _record(source_text, source.folder, audit, request, told.reading)
    with locked(out, LOCK_NAME):
        require_same(out, record)
        if fetch(source, told.watch):
            audit = examined(source)
            record = record.model_copy(update={"base": audit.report.checkpoint_digest})
        open_folder(out, record)
        events = EventLog(
            lambda event, fields: append_json_line(out / EVENTS_NAME, {"event": event} | fields)
        )
        notices.events = events
        facts = published(out, record)
        if facts is not None:
            notice("the adapter is finished: nothing is left to do")
            with _kept(record, request, notice, notices) as depot:
                if depot is not None:
                    depot.put(int(facts["steps"]))
            return _as_it_is(out, facts)
        if engine is None:
            site = here(source.folder, samples, out)
        else:
            require_room(engine, audit, asked, record.recipe, notice)
            site = elsewhere(engine, source, record, samples)
        events.emit("started", run=record.id, replicas=asked.replicas)
        with _kept(record, request, notice, notices) as depot, notices.noting():
            around = Surroundings(
                notices=notices, events=events, tell=notice, progress=told.look, depot=depot
            )
            return Tuning(site, out, record, asked, around).run()


@contextmanager
def _kept(
    record: RunRecord, request: TuneRequest, notice: Notice, notices: Notices
) -> Iterator[CheckpointDepot | None]:
    """Within it checkpoints are uploaded as they are committed, where there is a mirror; at its end the newest is."""
    from gemma_neuron.tuning.record import CHECKPOINTS

    if request.mirror is None:
        yield None
        return
    depot = CheckpointDepot(
        request.out / CHECKPOINTS,
        record.id,
        request.mirror,
        keep=request.keep,
        notice=notice,
        events=notices.events,
    )
    with flushed(depot.finish, request.mirror.grace, notices, notice):
        yield depot


def _record(
    source_text: str, folder: Path, audit: Any, request: TuneRequest, reading: Notice
) -> tuple[RunRecord, bytes]:
    """The run's identity, without a base while weights are elsewhere, and its sample file.

    Raises DataError, TemplateError or UsageError.
    """
    from gemma_neuron.chat import load_chat_assets
    from gemma_neuron.tuning.data import read_samples, sample_file
    from gemma_neuron.tuning.numerics import versions
    from gemma_neuron.tuning.record import RunRecord

    limit = _longest(audit, request.max_length)
    assets = load_chat_assets(folder)
    try:
        samples = read_samples(request.data, assets, limit, reading)
    finally:
        if assets.template is not None:
            assets.template.close()
    data = sample_file(samples)
    local = Path(source_text)
    record = RunRecord(
        base=audit.report.checkpoint_digest,
        samples=digest_bytes(data),
        recipe=_recipe(request, len(samples), int(audit.geometry.hidden)),
        model=local.resolve().name if local.is_dir() else source_text,
        data=request.data.name,
        versions=versions(),
    )
    return record, data


def _longest(audit: Any, asked: int | None) -> int:
    most = int(audit.geometry.max_context)
    if asked is not None and not 2 <= asked <= most:
        raise UsageError(
            f"--max-length {asked} is not between 2 and the model's {most} positions.",
            f"--max-length {most}",
        )
    return asked if asked is not None else min(LONGEST, most)


def _recipe(request: TuneRequest, samples: int, width: int) -> Recipe:
    if request.rank > width:
        raise UsageError(
            f"--rank {request.rank} is more than the model's width of {width}, and no change of a weight has more.",
            "--rank 8",
        )
    unknown = [name for name in request.targets if name not in PROJECTIONS]
    if unknown or not request.targets:
        raise UsageError(
            f"--targets {','.join(request.targets)}: {', '.join(unknown) or 'nothing'} is no projection of a layer.",
            f"Of {', '.join(PROJECTIONS)}.",
        )
    last = round(samples * request.epochs)
    if request.steps is not None:
        last = request.steps * request.batch
    if last < 1:
        raise UsageError(
            f"--epochs {request.epochs:g} of {samples} samples is not one sample.", "--epochs 1"
        )
    return Recipe(
        rank=request.rank,
        alpha=2 * request.rank if request.alpha is None else request.alpha,
        targets=tuple(name for name in PROJECTIONS if name in request.targets),
        dropout=request.dropout,
        learning_rate=request.learning_rate,
        batch=request.batch,
        steps=math.ceil(last / request.batch),
        samples=samples,
        last=last,
        seed=request.seed,
        dtype=request.dtype,
    )


def _as_it_is(out: Path, facts: dict[str, Any]) -> Tuned:
    """A finished adapter, nothing done."""
    from gemma_neuron.tuning.adapter import WEIGHTS_NAME

    return Tuned(
        out=out,
        steps=int(facts["steps"]),
        samples_per_second=0.0,
        final_loss=float(facts["loss"]),
        restarts=0,
        lost_steps=0,
        downtime_seconds=0.0,
        replicas=0,
        parameters=int(facts["parameters"]),
        peak_bytes=0,
        digest=digest_file(out / WEIGHTS_NAME),
    )
