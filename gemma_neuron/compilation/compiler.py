"""Build what a port's spec asks for and its ledger does not have yet.

In: a port with its plan, the geometry, the spec. Out: `CompiledModel`. Each unit is compiled in a process of its
own, published by rename and committed at once; a killed run goes on with the units that are not committed.
Two keys (as ccache has two modes): a shortcut over our own sources and the inputs, which needs no tracing,
and the real key over the traced graph, taken when the shortcut differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gemma_neuron.artifacts import digest_json, remove, sync_folder
from gemma_neuron.backends.base import Backend, CompileSpec, UnitSpec
from gemma_neuron.compilation import ledger, worker
from gemma_neuron.compilation.pool import WorkerPool
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

    unit: UnitSpec
    shortcut: str
    found: ledger.Found | None


def compile_units(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    spec: CompileSpec,
    backend: Backend,
    notice: Notice,
) -> CompiledModel:
    """Compile every unit of `spec` that is not committed. Raises CompileError."""
    units = spec.units()
    _remove_leftovers(port, units)
    ledger.settle(port, units)
    life = ledger.life(port)
    pending, reused = [], []
    for unit in units:
        shortcut = digest_json(backend.shortcut_key(geometry, plan, spec, unit))
        found = ledger.committed(port, unit)
        if found is not None and not found.problem and found.shortcut == shortcut:
            reused.append(unit.name)
            _record_reuse(port, unit, found, life)
        else:
            pending.append(Pending(unit, shortcut, found))
    built: list[str] = []
    peak = 0
    if pending:
        backend.require()
    for todo, outcome in _outcomes(port, geometry, plan, spec, pending):
        was_built = _publish(port, todo, outcome, life, notice)
        (built if was_built else reused).append(todo.unit.name)
        peak = max(peak, outcome.host_peak_bytes)
    return CompiledModel(
        total=len(units),
        built=tuple(built),
        reused=tuple(reused),
        host_peak_bytes=peak,
        output_bytes=_output_bytes(port, units),
    )


def _outcomes(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    spec: CompileSpec,
    pending: list[Pending],
) -> Iterator[tuple[Pending, worker.Outcome]]:
    """Run the pending units, as many at once as there are cores, in order of completion."""
    if not pending:
        return
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    at_once = min(len(pending), cores)
    jobs = [_job(port, geometry, plan, spec, todo, cores // at_once) for todo in pending]
    by_name = {todo.unit.name: todo for todo in pending}
    pool = WorkerPool(worker.run, at_once, [worker.__name__])
    for job, outcome in pool.run(jobs, lambda job: job.unit.name):
        yield by_name[job.unit.name], outcome


def _job(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    spec: CompileSpec,
    todo: Pending,
    threads: int,
) -> worker.Job:
    known = "" if todo.found is None else todo.found.key_digest
    return worker.Job(
        geometry=geometry,
        plan=plan,
        spec=spec,
        unit=todo.unit,
        folder=port.unit_folder(todo.unit),
        known_key=known,
        threads=max(1, threads),
    )


def _publish(port: Port, todo: Pending, outcome: worker.Outcome, life: int, notice: Notice) -> bool:
    """Commit a finished unit; False when its committed artefact turned out to be the same graph."""
    unit, unit_set = todo.unit, port.unit_set(todo.unit)
    facts = {
        "shortcut": todo.shortcut,
        "key": outcome.key,
        "key_digest": outcome.key_digest,
        "shared": port.spec.shared_digest(port.plan.fingerprint()),
    }
    built = bool(outcome.files)
    if built:
        notice(
            f"{unit.name}: built in {outcome.seconds:.0f} s, peak "
            f"{outcome.host_peak_bytes / 2**30:.1f} GiB "
            f"({ledger.why_missed(port, unit, outcome.key, todo.found)})"
        )
        unit_set.withdraw()
        folder = port.unit_folder(unit)
        shutil.rmtree(folder, ignore_errors=True)
        outcome.partial.replace(folder)
        sync_folder(folder.parent)
        made = {
            "life": life,
            "seconds": round(outcome.seconds, 3),
            "host_peak_bytes": outcome.host_peak_bytes,
        }
        unit_set.commit(outcome.files, {**facts, "built": made})
    else:
        manifest = unit_set.verify()
        unit_set.commit_entries(manifest.files, manifest.facts | facts)
        notice(f"{unit.name}: reused, the traced graph is the same")
    ledger.record(
        port,
        unit,
        "built" if built else "reused",
        life=life,
        key=outcome.key,
        key_digest=outcome.key_digest,
        seconds=outcome.seconds,
        host_peak_bytes=outcome.host_peak_bytes,
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
