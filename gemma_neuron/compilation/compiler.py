"""Build what a port's spec asks for and its ledger does not have yet.

In: a port with its plan, the geometry, the spec. Out: `CompiledModel`. Each unit is compiled in a worker of its
own, published by rename and committed at once; a killed run goes on with the units that are not committed.
Two keys (as ccache has two modes): a shortcut over our own sources and the inputs, which needs no tracing,
and the real key over the traced graph, taken when the shortcut differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.artifacts import digest_json, remove, sync_folder
from gemma_neuron.backends.base import Backend, CompileSpec, Limits, PortPart, UnitSpec
from gemma_neuron.compilation import ledger, worker
from gemma_neuron.compilation.schedule import Schedule
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Port

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """What `compile_units` left: how many units, which were built, the largest peak of one unit."""

    total: int
    built: tuple[str, ...]
    reused: tuple[str, ...]
    host_peak_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Pending:
    """One unit that has to be looked at in a worker."""

    part: PortPart
    shortcut: str
    found: ledger.Found | None

    @property
    def unit(self) -> UnitSpec:
        return self.part.unit


def compile_units(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    spec: CompileSpec,
    backend: Backend,
    notice: Notice,
    limits: Limits | None = None,
    most_at_once: int | None = None,
) -> CompiledModel:
    """Compile every unit of `spec` that is not committed, at most `most_at_once` together. Raises CompileError."""
    units = spec.units()
    _remove_leftovers(port, units)
    ledger.settle(port, units)
    life = ledger.life(port)
    events = EventLog(lambda event, facts: port.append("events.jsonl", {"event": event} | facts))
    events.emit("started", life=life)
    built: list[str] = []
    reused: list[str] = []
    peak = 0
    with closing(_engine(backend)) as engine:
        for stage in spec.stages():
            parts = parts_of(stage, port, geometry, plan, spec)
            pending = _looked_up(parts, backend, reused, life)
            if not pending:
                continue
            backend.require()
            at_once = backend.workers([todo.part for todo in pending], _cores())
            schedule = Schedule(engine, events, worker.run, min(at_once, most_at_once or at_once))
            for todo, result in _results(schedule, pending, limits or Limits(), life):
                was_built = _publish(port, todo, result, life, notice)
                (built if was_built else reused).append(todo.unit.name)
                peak = max(peak, result.host_peak_bytes)
    events.emit("done", life=life, built=built, downtime_seconds=round(events.downtime_seconds, 4))
    return CompiledModel(
        total=len(units),
        built=tuple(built),
        reused=tuple(reused),
        host_peak_bytes=peak,
        output_bytes=_output_bytes(port, units),
    )


def parts_of(
    units: Iterable[UnitSpec],
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    spec: CompileSpec,
) -> list[PortPart]:
    return [
        PortPart(geometry=geometry, plan=plan, spec=spec, unit=unit, port=port) for unit in units
    ]


def trace_only(parts: list[PortPart], out: Path, backend: Backend) -> tuple[str, ...]:
    """Trace only: what the compiler would be given, into `out`/<unit>/. Returns the files' names.

    Units that depend on another's result (stage two) are traced as they are before it is known.
    """
    jobs = [
        worker.Job(part=part, known_key="", threads=1, limits=Limits(), dry=out / part.unit.name)
        for part in parts
    ]
    with closing(_engine(backend)) as engine:
        schedule = Schedule(engine, EventLog(), worker.run, backend.workers(parts, _cores()))
        names = [
            f"{job.name}/{name}" for job, result in schedule.run(jobs) for name in result.files
        ]
    return tuple(sorted(names))


def _looked_up(
    parts: list[PortPart], backend: Backend, reused: list[str], life: int
) -> list[Pending]:
    """The units that are not committed as asked; the others are noted as reused."""
    pending = []
    for part in parts:
        shortcut = digest_json(backend.shortcut_key(part))
        found = ledger.committed(part.port, part.unit)
        if found is not None and not found.problem and found.shortcut == shortcut:
            reused.append(part.unit.name)
            _record_reuse(part.port, part.unit, found, life)
        else:
            pending.append(Pending(part, shortcut, found))
    return pending


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _engine(backend: Backend) -> EmbeddedEngine:
    return EmbeddedEngine(preload=[*backend.preload, worker.__name__])


def _results(
    schedule: Schedule[worker.Job, worker.UnitResult],
    pending: list[Pending],
    limits: Limits,
    life: int,
) -> Iterator[tuple[Pending, worker.UnitResult]]:
    """The pending units' results in order of completion; units given up get their line in the ledger."""
    jobs = [
        worker.Job(
            part=todo.part,
            known_key="" if todo.found is None else todo.found.key_digest,
            threads=max(1, _cores() // schedule.most_at_once),
            limits=limits,
        )
        for todo in pending
    ]
    by_name = {todo.unit.name: todo for todo in pending}
    try:
        for job, result in schedule.run(jobs):
            yield by_name[job.name], result
    finally:
        for job, error in schedule.failed:
            ledger.record_failure(job.part.port, job.part.unit, error.message, life)


def _publish(
    port: Port, todo: Pending, result: worker.UnitResult, life: int, notice: Notice
) -> bool:
    """Commit a finished unit; False when its committed artefact turned out to be the same graph."""
    unit, unit_set = todo.unit, port.unit_set(todo.unit)
    facts = {
        "shortcut": todo.shortcut,
        "key": result.key,
        "key_digest": result.key_digest,
        "shared": port.spec.shared_digest(port.plan.fingerprint()),
    }
    built = bool(result.files)
    if built:
        notice(
            f"{unit.name}: built in {result.seconds:.0f} s, peak "
            f"{result.host_peak_bytes / 2**30:.1f} GiB "
            f"({ledger.why_missed(port, unit, result.key, todo.found)})"
        )
        unit_set.withdraw()
        folder = port.unit_folder(unit)
        shutil.rmtree(folder, ignore_errors=True)
        result.partial.replace(folder)
        sync_folder(folder.parent)
        made = {
            "life": life,
            "seconds": round(result.seconds, 3),
            "host_peak_bytes": result.host_peak_bytes,
        }
        unit_set.commit(result.files, {**facts, "built": made})
    else:
        manifest = unit_set.verify()
        unit_set.commit_entries(manifest.files, manifest.facts | facts)
        notice(f"{unit.name}: reused, the traced graph is the same")
    ledger.record(
        port,
        unit,
        "built" if built else "reused",
        life=life,
        key=result.key,
        key_digest=result.key_digest,
        seconds=result.seconds,
        host_peak_bytes=result.host_peak_bytes,
    )
    return built


def _record_reuse(port: Port, unit: UnitSpec, found: ledger.Found, life: int) -> None:
    ledger.record(
        port,
        unit,
        "reused",
        life=life,
        key=found.key,
        key_digest=found.key_digest,
        seconds=0.0,
        host_peak_bytes=0,
    )


def _remove_leftovers(port: Port, units: Iterable[UnitSpec]) -> None:
    """Remove unit folders no spec asks for any more, without a marker, or half-written."""
    graphs = port.path / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    wanted = {unit.name: unit for unit in units}
    for folder in sorted(graphs.iterdir()):
        unit = wanted.get(folder.name)
        if unit is None or not port.unit_set(unit).marker_path.is_file():
            remove(folder)


def _output_bytes(port: Port, units: Iterable[UnitSpec]) -> int:
    folders = [port.unit_folder(unit) for unit in units]
    return sum(f.stat().st_size for folder in folders for f in folder.iterdir())
