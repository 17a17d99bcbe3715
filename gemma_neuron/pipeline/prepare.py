"""Before the first byte is written: source, audit, plan, record; then the port's lock and its front."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gemma_neuron import __version__
from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.backends.base import Backend, CompileSpec, Dtype
from gemma_neuron.compilation.buckets import choose_buckets, choose_context, choose_slots
from gemma_neuron.errors import TemplateError, UsageError
from gemma_neuron.pipeline.request import CompileRequest, run_dtype
from gemma_neuron.pipeline.sources import Watch, examined, fetch, open_any
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
    from gemma_neuron.plan import ShardPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    source: Source
    audit: Audit
    plan: ShardPlan
    port: Port
    record: PortRecord


def prepare(
    source_text: str,
    request: CompileRequest,
    spec: Backend | None,
    watch: Watch,
    *,
    makes_port: bool = True,
) -> Prepared:
    """Everything that can be refused is refused here, before anything large is downloaded or written.

    Without `makes_port` nothing is downloaded either: a dry run needs no weights.
    """
    from gemma_neuron.sharding.planner import layout

    source = open_any(source_text, watch)
    audit = examined(source)
    assert audit.geometry is not None and audit.table is not None
    template = audit.report.chat_template
    if not template["present"] and not request.base:
        raise TemplateError(
            f"{source.uri} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): a chat model ported without it answers nonsense.",
            "Fetch chat_template.jinja too; for a base model add --base (plain completion only).",
        )
    dtype = run_dtype(request.dtype, audit.geometry.dtype)
    plan = layout(audit.geometry, audit.table, request.tp, request.strategy, dtype)
    compile_spec = None if spec is None else _spec(request, audit, dtype, spec)
    record = _record(source, audit, plan, compile_spec, spec)
    if makes_port:
        check_out_folder(request.out, record.fingerprints)
    if makes_port and fetch(source, watch):
        audit = examined(source)
        record = _record(source, audit, plan, compile_spec, spec)
        check_out_folder(request.out, record.fingerprints)
    return Prepared(source, audit, plan, Port(request.out), record)


@contextmanager
def only_worker(prepared: Prepared) -> Iterator[None]:
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


def _spec(request: CompileRequest, audit: Audit, dtype: Dtype, chosen: Backend) -> CompileSpec:
    assert audit.geometry is not None
    context = choose_context(audit.geometry, request.max_context)
    return CompileSpec(
        backend=request.backend,
        dtype=dtype,
        slots=choose_slots(request.slots),
        max_context=context,
        buckets=choose_buckets(request.buckets, context),
        layout=request.layout and chosen.optimises_layout,
    )


def _record(
    source: Source,
    audit: Audit,
    plan: ShardPlan,
    spec: CompileSpec | None,
    chosen: Backend | None,
) -> PortRecord:
    from gemma_neuron.checkpoint.source import config_digest, prompt_digest

    versions = {"gemma-neuron": __version__}
    versions |= {name: importlib.metadata.version(name) for name in ("transformers", "safetensors")}
    return PortRecord(
        source=SourceRecord(
            kind=source.kind,
            uri=str(source) if source.kind == "folder" else source.uri,
            revision=source.revision,
        ),
        fingerprints=Fingerprints(
            config=config_digest(source),
            checkpoint=audit.report.checkpoint_digest,
            template=str(audit.report.chat_template["sha256"] or ""),
            prompt=prompt_digest(source),
            plan=plan.fingerprint(),
        ),
        versions=versions | ({} if chosen is None else chosen.versions()),
        compile=spec,
        warnings=audit.report.warning_lines,
    )


def _write_front(prepared: Prepared) -> None:
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
