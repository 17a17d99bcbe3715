"""Build what a port's spec asks for and its ledger does not have yet.

In: a port with its plan, the geometry, the spec. Out: `CompiledModel`. Each unit is compiled in a worker of its
own, published by rename and committed at once; a killed run goes on with the units that are not committed.
Two keys (as ccache has two modes): a shortcut over our own sources and the inputs, which needs no tracing,
and the real key over the traced graph, taken when the shortcut differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import digest_json, remove, sync_folder
from gemma_neuron.backends.base import Backend, CompileSpec, Limits, PortPart, UnitSpec
from gemma_neuron.compilation import ledger, worker
from gemma_neuron.compilation.conditions import Conditions
from gemma_neuron.compilation.prediction import Prediction, predict
from gemma_neuron.compilation.schedule import Schedule
from gemma_neuron.compilation.workshop import Here, Workshop
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.notice import Notices
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.machine import HostBudget
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Outcome, Port

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """What `compile_units` left: how many units, which were built, and what they took of the host's memory."""

    total: int
    built: tuple[str, ...]
    reused: tuple[str, ...]
    host_peak_bytes: int
    """Largest of one unit, or of all processes together."""
    unit_peaks: dict[str, int]
    """Unit built now → peak of its worker's process tree."""
    output_bytes: int
    retries: int
    downtime_seconds: float
    """How long units waited for another try after a fault."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One unit that has to be looked at in a worker."""

    part: PortPart
    shortcut_key: dict[str, str]
    found: ledger.Found | None
    expected: Prediction

    @property
    def shortcut(self) -> str:
        return digest_json(self.shortcut_key)

    @property
    def unit(self) -> UnitSpec:
        return self.part.unit


def compile_units(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    backend: Backend,
    workshop: Workshop,
    notices: Notices,
    limits: Limits | None = None,
    before_stage: Callable[[], None] = lambda: None,
) -> CompiledModel:
    """Compile every unit of the port's spec that is not committed, in `workshop`; told and logged as `notices` are.
    `before_stage` may commit units that it has from elsewhere.

    Raises CompileError for units that cannot be built, DoesNotFitError for one that memory cannot hold.
    """
    spec = port.spec
    units = spec.units()
    _remove_leftovers(port, units)
    ledger.settle(port, units)
    life = ledger.life(port)
    events = notices.events
    events.emit("started", life=life)
    peaks: dict[str, int] = {}
    reused: list[str] = []
    most = 0
    with closing(workshop.engine()) as engine:
        for stage in spec.stages():
            before_stage()
            ledger.settle(port, units)
            parts = parts_of(stage, port, geometry, plan, spec)
            pending = _looked_up(parts, backend, reused, life)
            if not pending:
                continue
            backend.require()
            expected = {todo.unit.name: todo.expected for todo in pending}
            workshop.begin([todo.part for todo in pending], list(expected.values()))
            conditions = _conditions(workshop, expected, notices)
            at_once = workshop.at_once(list(expected.values()))
            schedule = Schedule(engine, events, workshop.work, conditions, at_once)
            results = _results(schedule, workshop, pending, limits or Limits(), life)
            with notices.noting():
                for todo, result in results:
                    if _publish(port, todo, result, life, notices.tell):
                        peaks[todo.unit.name] = result.host_peak_bytes
                    else:
                        reused.append(todo.unit.name)
            most = max(most, conditions.memory.peak_bytes)
    downtime = round(events.downtime_seconds, 4)
    events.emit("done", life=life, built=list(peaks), downtime_seconds=downtime)
    return CompiledModel(
        total=len(units),
        built=tuple(peaks),
        reused=tuple(reused),
        host_peak_bytes=max(most, *peaks.values(), 0),
        unit_peaks=peaks,
        output_bytes=_output_bytes(port, units),
        retries=events.counts.get("retry", 0),
        downtime_seconds=downtime,
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


def trace_only(
    parts: list[PortPart], out: Path, backend: Backend, budget: HostBudget
) -> tuple[str, ...]:
    """Trace only: what the compiler would be given, into `out`/<unit>/. Returns the files' names.

    Units that depend on another's result (stage two) are traced as they are before it is known.
    """
    jobs = [
        worker.Job(part=part, known_key="", threads=1, limits=Limits(), dry=out / part.unit.name)
        for part in parts
    ]
    events, expected, here = EventLog(), predict(parts, backend), Here(backend, budget)
    conditions = _conditions(here, expected, Notices())
    with closing(here.engine()) as engine:
        at_once = here.at_once(list(expected.values()))
        schedule = Schedule(engine, events, here.work, conditions, at_once)
        names = [
            f"{end.job.name}/{name}" for end in schedule.run(jobs) for name in end.result.files
        ]
    return tuple(sorted(names))


def _looked_up(
    parts: list[PortPart], backend: Backend, reused: list[str], life: int
) -> list[Pending]:
    """The units that are not committed as asked; the others are noted as reused."""
    pending = []
    expected = predict(parts, backend)
    for part in parts:
        shortcut_key = backend.shortcut_key(part)
        found = ledger.committed(part.port, part.unit)
        if found is not None and not found.problem and found.shortcut == digest_json(shortcut_key):
            reused.append(part.unit.name)
            taken = ledger.Taken(life=life)
            ledger.record(
                part.port, part.unit, "reused", taken, key=found.key, key_digest=found.key_digest
            )
        else:
            pending.append(Pending(part, shortcut_key, found, expected[part.unit.name]))
    return pending


def _conditions(
    workshop: Workshop, expected: dict[str, Prediction], notices: Notices
) -> Conditions:
    long = frozenset(name for name, found in expected.items() if found.long)
    return Conditions(workshop.memory(expected), notices, long)


def _results(
    schedule: Schedule[worker.Job, Any],
    workshop: Workshop,
    pending: list[Pending],
    limits: Limits,
    life: int,
) -> Iterator[tuple[Pending, worker.UnitResult]]:
    """The pending units' results in order of completion; units given up get their line in the ledger."""
    jobs = [
        worker.Job(
            part=todo.part,
            known_key="" if todo.found is None else todo.found.key_digest,
            threads=workshop.threads(schedule.most_at_once),
            limits=limits,
            shortcut_key=todo.shortcut_key,
        )
        for todo in pending
    ]
    by_name = {todo.unit.name: todo for todo in pending}
    try:
        for end in schedule.run(jobs):
            result = workshop.received(end.job.part, end.result)
            peak = max(result.host_peak_bytes, end.host_peak_bytes)
            yield by_name[end.job.name], replace(result, host_peak_bytes=peak)
    finally:
        for failed in schedule.failed:
            todo = by_name[failed.job.name]
            taken = ledger.Taken(
                life=life,
                host_peak_bytes=failed.host_peak_bytes,
                host_model_bytes=todo.expected.model_bytes,
            )
            ledger.record_failure(todo.part.port, todo.unit, failed.error.message, taken)


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
    taken = ledger.Taken(
        life=life,
        seconds=round(result.seconds, 3),
        host_peak_bytes=result.host_peak_bytes if built else 0,
        host_model_bytes=todo.expected.model_bytes,
    )
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
        unit_set.commit(result.files, {**facts, "built": asdict(taken)})
    else:
        manifest = unit_set.verify()
        unit_set.commit_entries(manifest.files, manifest.facts | facts)
        notice(f"{unit.name}: reused, the traced graph is the same")
    outcome: Outcome = "built" if built else "reused"
    ledger.record(port, unit, outcome, taken, key=result.key, key_digest=result.key_digest)
    return built


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
