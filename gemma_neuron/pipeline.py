"""The order of the stages, and what of an earlier run can be reused. The only module that knows it.

inspect → plan → shard → compile → validate. Each function here goes as far as its command asks, and
whatever is committed already is not done again.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from gemma_neuron import __version__
from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.backends.base import Backend, CompileSpec, Dtype, Runner
from gemma_neuron.backends.registry import backend
from gemma_neuron.compilation.buckets import choose_buckets, choose_context, choose_slots
from gemma_neuron.errors import TemplateError, UsageError
from gemma_neuron.port import (
    LOCK_NAME,
    RECORD_NAME,
    Fingerprints,
    Port,
    PortRecord,
    SourceRecord,
    check_out_folder,
    remove_leftovers,
)

if TYPE_CHECKING:
    from gemma_neuron.checkpoint.audit import Audit
    from gemma_neuron.checkpoint.source import Source
    from gemma_neuron.compilation.compiler import CompiledModel
    from gemma_neuron.plan import ShardPlan
    from gemma_neuron.reports import ValidationReport
    from gemma_neuron.sharding.planner import Planned, StrategyChoice
    from gemma_neuron.sharding.writer import Progress, ShardedCheckpoint
    from gemma_neuron.validation.export import GoldenReport
    from gemma_neuron.validation.validator import Options

DTYPES = get_args(Dtype)
Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What `compile` was asked. None: the default of the model or of `compilation.buckets`."""

    out: Path
    backend: str
    tp: int
    strategy: StrategyChoice = "auto"
    dtype: str | None = None
    max_context: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortResult:
    """What `shard` and `compile` answer (JSON contract)."""

    port: Path
    digest: str
    total: int
    built: int
    reused: int
    seconds: float
    host_peak_bytes: int
    output_bytes: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "port": str(self.port),
            "digest": self.digest,
            "units": {"total": self.total, "built": self.built, "reused": self.reused},
            "seconds": round(self.seconds, 2),
            "host_peak_bytes": self.host_peak_bytes,
            "output_bytes": self.output_bytes,
            "warnings": list(self.warnings),
        }


def examined(source: Source) -> Audit:
    """The audit of a source, passed. Raises AuditFailed with the first errors."""
    from gemma_neuron.checkpoint.audit import examine, require_ok

    # A missing template is refused by `_prepare`, with the flag that allows it.
    found = examine(source, need_template=False)
    require_ok(found.report)
    return found


def planned(
    source_text: str,
    *,
    tp: int,
    instance: str,
    max_context: int | None,
    slots: int | None,
    buckets: tuple[int, ...] | None,
    strategy: StrategyChoice,
) -> Planned:
    """`plan`: needs config.json only."""
    from gemma_neuron.checkpoint.source import open_source, read_config
    from gemma_neuron.instances import instance as find_instance
    from gemma_neuron.models.registry import read_geometry, read_parameter_table
    from gemma_neuron.sharding.planner import make_plan

    geometry = read_geometry(read_config(open_source(source_text)))
    context = choose_context(geometry, max_context)
    return make_plan(
        geometry,
        read_parameter_table(geometry),
        instance=find_instance(instance),
        tp=tp,
        context=context,
        slots=choose_slots(slots, default=1),
        buckets=choose_buckets(buckets, context),
        strategy=strategy,
    )


def shard(source_text: str, request: CompileRequest, progress: Progress | None) -> PortResult:
    """Audit, plan and write rank files; committed ranks are kept."""
    started = time.monotonic()
    prepared = _prepare(source_text, request, spec=None)
    with _only_worker(prepared):
        sharded = _shard(prepared, progress)
    record = prepared.port.record
    return PortResult(
        port=prepared.port.path,
        digest=record.digest,
        total=sharded.ranks,
        built=len(sharded.written),
        reused=sharded.ranks - len(sharded.written),
        seconds=time.monotonic() - started,
        host_peak_bytes=_own_peak(),
        output_bytes=sharded.output_bytes,
        warnings=record.warnings,
    )


def compile_port(
    source_text: str, request: CompileRequest, progress: Progress | None, notice: Notice
) -> PortResult:
    """Audit, plan, shard and compile; the toolchain is checked before anything long starts."""
    from gemma_neuron.compilation.compiler import compile_units

    started = time.monotonic()
    chosen = backend(request.backend)
    chosen.require()
    prepared = _prepare(source_text, request, spec=chosen)
    for warning in prepared.record.warnings:
        notice(f"warning: {warning}")
    geometry, port = prepared.audit.geometry, prepared.port
    assert geometry is not None
    with _only_worker(prepared):
        sharded = _shard(prepared, progress)
        compiled: CompiledModel = compile_units(
            port, geometry, prepared.plan, port.spec, chosen, notice
        )
    return PortResult(
        port=port.path,
        digest=port.record.digest,
        total=compiled.total,
        built=len(compiled.built),
        reused=len(compiled.reused),
        seconds=time.monotonic() - started,
        host_peak_bytes=max(compiled.host_peak_bytes, _own_peak()),
        output_bytes=sharded.output_bytes + compiled.output_bytes,
        warnings=port.record.warnings,
    )


def open_port(path: Path) -> Port:
    """A compiled port whose front is what was committed.

    Raises PortIncompleteError when the folder is none or has no graphs yet, IntegrityError when config,
    tokenizer, template or plan are not those it was compiled with.
    """
    port = Port(path)
    assert port.spec is not None
    port.source_set.verify()
    assert port.plan is not None
    return port


def runner_factory(port: Port) -> Callable[[], Runner]:
    """What loads the port on the back end it was compiled for, when called."""
    return lambda: backend(port.spec.backend).load(port)


def validate_port(
    path: Path, checkpoint: str | None, options: Options, *, notice: Notice, progress: Notice
) -> ValidationReport:
    """Load a port and judge it. The checkpoint defaults to where the port was made from, if it is there."""
    from gemma_neuron.validation.validator import validate

    port = open_port(path)
    source = _checkpoint_folder(port, checkpoint)
    notice(f"checkpoint: {source or 'not at hand, a golden is needed'}")
    runner = runner_factory(port)()
    try:
        return validate(port, runner, replace(options, checkpoint=source), progress=progress)
    finally:
        runner.close()


def golden_file(
    source_text: str, *, out: Path, dtype: str, questions: Path | None, notice: Notice
) -> GoldenReport:
    """`golden`: a reference from the checkpoint alone."""
    from gemma_neuron.checkpoint.source import open_source
    from gemma_neuron.validation.export import export_golden

    source = open_source(source_text)
    audit = examined(source)
    return export_golden(
        source.folder,
        out,
        checkpoint_digest=audit.report.checkpoint_digest,
        dtype=_dtype(dtype, dtype),
        questions=questions,
        progress=notice,
    )


def _checkpoint_folder(port: Port, given: str | None) -> Path | None:
    from gemma_neuron.checkpoint.source import open_source

    if given is not None:
        return open_source(given).folder
    origin = Path(port.record.source.uri)
    return origin if (origin / "config.json").is_file() else None


@dataclass(frozen=True, slots=True)
class _Prepared:
    source: Source
    audit: Audit
    plan: ShardPlan
    port: Port
    record: PortRecord


def _prepare(source_text: str, request: CompileRequest, spec: Backend | None) -> _Prepared:
    """Everything that can be refused is refused here, before the first byte is written."""
    from gemma_neuron.checkpoint.source import open_source
    from gemma_neuron.sharding.planner import layout

    source = open_source(source_text)
    audit = examined(source)
    assert audit.geometry is not None and audit.table is not None
    template = audit.report.chat_template
    if not template["present"] and not request.base:
        raise TemplateError(
            f"{source.uri} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): a chat model ported without it answers nonsense.",
            "Fetch chat_template.jinja too; for a base model add --base (plain completion only).",
        )
    dtype = _dtype(request.dtype, audit.geometry.dtype)
    plan = layout(audit.geometry, audit.table, request.tp, request.strategy, dtype)
    compile_spec = None if spec is None else _spec(request, audit, dtype)
    record = _record(source, audit, plan, compile_spec, spec)
    check_out_folder(request.out, record.fingerprints)
    return _Prepared(source, audit, plan, Port(request.out), record)


@contextmanager
def _only_worker(prepared: _Prepared) -> Iterator[None]:
    """Hold the port against a second process, clean up after a killed one, write the port's front."""
    from filelock import FileLock, Timeout

    path = prepared.port.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_NAME)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(
            f"Another process works on {path}.", "Wait for it, or name another --out."
        ) from error
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written: {error.strerror or error}.", "Name another folder."
        ) from error
    try:
        remove_leftovers(path)
        _write_front(prepared)
        yield
    finally:
        lock.release()


def _dtype(asked: str | None, own: str) -> Dtype:
    dtype = asked or (own if own in DTYPES else "bfloat16")
    if dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype}: Gemma's activations leave float16's range; there are "
            f"{', '.join(DTYPES)}.",
            "Use --dtype bfloat16.",
        )
    return cast(Dtype, dtype)


def _spec(request: CompileRequest, audit: Audit, dtype: Dtype) -> CompileSpec:
    assert audit.geometry is not None
    context = choose_context(audit.geometry, request.max_context)
    return CompileSpec(
        backend=request.backend,
        dtype=dtype,
        slots=choose_slots(request.slots),
        max_context=context,
        buckets=choose_buckets(request.buckets, context),
    )


def _record(
    source: Source,
    audit: Audit,
    plan: ShardPlan,
    spec: CompileSpec | None,
    chosen: Backend | None,
) -> PortRecord:
    from gemma_neuron.checkpoint.source import config_digest

    versions = {"gemma-neuron": __version__}
    versions |= {name: importlib.metadata.version(name) for name in ("transformers", "safetensors")}
    return PortRecord(
        source=SourceRecord(
            kind=source.kind, uri=str(source.folder.resolve()), revision=source.revision
        ),
        fingerprints=Fingerprints(
            config=config_digest(source),
            checkpoint=audit.report.checkpoint_digest,
            template=str(audit.report.chat_template["sha256"] or ""),
            plan=plan.fingerprint(),
        ),
        versions=versions | ({} if chosen is None else chosen.versions()),
        compile=spec,
        warnings=tuple(f"{found.kind}: {found.message}" for found in audit.report.warnings),
    )


def _write_front(prepared: _Prepared) -> None:
    """port.json first: it is what makes the folder a port that a killed run can go on with."""
    from gemma_neuron.checkpoint.source import copy_small_files

    port, record = prepared.port, prepared.record
    known = port.record if (port.path / RECORD_NAME).is_file() else None
    if record.compile is None and known is not None:
        record = record.model_copy(update={"compile": known.compile, "versions": known.versions})
    if known is None or known != record:
        port.write_record(record)
    names = copy_small_files(prepared.source, port.source_folder)
    port.source_set.commit(names)
    write_json_atomic(port.path / "audit.json", prepared.audit.report.to_json())
    write_json_atomic(port.path / "plan.json", asdict(prepared.plan))


def _shard(prepared: _Prepared, progress: Progress | None) -> ShardedCheckpoint:
    from gemma_neuron.sharding.source_record import write_source_record
    from gemma_neuron.sharding.writer import write_ranks

    assert prepared.audit.geometry is not None
    tensors = prepared.audit.tensors()
    files = {entry.file for entry in tensors.values()}
    write_source_record(prepared.port, files, str(prepared.source.folder.resolve()))
    return write_ranks(prepared.port, prepared.audit.geometry, prepared.plan, tensors, progress)


def _own_peak() -> int:
    """Peak resident bytes of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
