"""Before the first byte is written: source, audit, plan, record; then the port's lock and its front."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gemma_neuron import __version__
from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.backends.base import Backend, CompileSpec, Dtype
from gemma_neuron.compilation.buckets import choose_buckets, choose_context, choose_slots
from gemma_neuron.errors import (
    AccessError,
    CheckpointError,
    NetworkError,
    SourceChangedError,
    SourceNotFoundError,
    TemplateError,
    UsageError,
)
from gemma_neuron.names import path_of
from gemma_neuron.pipeline.locking import locked
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
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.plan import ShardPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    source: Source
    audit: Audit
    plan: ShardPlan
    port: Port
    record: PortRecord
    small: dict[str, bytes]
    """Name → bytes of the port's `source/`: what was judged is what is written."""
    has_mirror: bool = False
    """From which a part that was begun can be gone on with."""


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

    source = _opened(source_text, request.mirror if makes_port else None, watch)
    if makes_port:
        _require_text(source)
    audit, small = _judged(source)
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
    record = _record(source, audit, small, plan, compile_spec, spec)
    if makes_port:
        check_out_folder(request.out, record.fingerprints)
    if makes_port and fetch(source, watch):
        audit, small = _judged(source)
        record = _record(source, audit, small, plan, compile_spec, spec)
        check_out_folder(request.out, record.fingerprints)
    has_mirror = request.mirror is not None
    return Prepared(source, audit, plan, Port(request.out), record, small, has_mirror)


def _opened(text: str, mirror: MirrorOptions | None, watch: Watch) -> Source:
    """SOURCE; a folder that is gone with its machine is put back from the mirror first. Raises as `open_any` does."""
    try:
        return open_any(text, watch)
    except SourceNotFoundError:
        if mirror is None or text.startswith("s3://"):
            raise
        from gemma_neuron.pipeline.put_back import put_back

        folder = path_of(text).absolute()
        try:
            there = put_back(folder, mirror.uri, mirror.bucket_owner, watch.tell, watch.progress)
        except (AccessError, NetworkError) as error:
            watch.tell(f"warning: {folder} is not looked for in the mirror: {error.message}")
            there = False
        if not there:
            raise
    return open_any(text, watch)


def _judged(source: Source) -> tuple[Audit, dict[str, bytes]]:
    """The audit, passed, and the small files as they were before it and still are after it."""
    from gemma_neuron.checkpoint.source import read_small_files

    try:
        before = read_small_files(source)
    except CheckpointError:
        examined(source)  # which says what is wrong with it
        raise
    audit = examined(source)
    after = read_small_files(source)
    if changed := sorted(name for name, data in after.items() if before.get(name) != data):
        raise SourceChangedError(
            f"{source.uri}: {', '.join(changed)} changed while the checkpoint was audited.",
            "Run the same command when the checkpoint is at rest.",
        )
    return audit, after


def _require_text(source: Source) -> None:
    """A port records where it came from, as text."""
    try:
        str(source).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The path {str(source)!r} is not UTF-8, and a port records the path of its source.",
            "Rename the folder, or name it by a link with a plain name outside of it.",
        ) from error


@contextmanager
def only_worker(prepared: Prepared) -> Iterator[None]:
    """Hold the port against a second process, clean up after a killed one, write the port's front."""
    path = prepared.port.path
    with locked(path, LOCK_NAME):
        # another run may have made a port of it between the first look and the lock
        check_out_folder(path, prepared.record.fingerprints)
        remove_leftovers(path, spare_transfers=prepared.has_mirror)
        _write_front(prepared)
        yield


def show_warnings(warnings: Sequence[str], notice: Callable[[str], None]) -> None:
    """What the audit warned of, again at each later stage: by then nobody remembers it."""
    for warning in warnings:
        notice(f"warning: {warning}")


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
    small: dict[str, bytes],
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
            config=config_digest(small),
            checkpoint=audit.report.checkpoint_digest,
            template=str(audit.report.chat_template["sha256"] or ""),
            prompt=prompt_digest(small),
            plan=plan.fingerprint(),
        ),
        versions=versions | ({} if chosen is None else chosen.versions()),
        compile=spec,
        warnings=audit.report.warning_lines,
    )


def _write_front(prepared: Prepared) -> None:
    """port.json first: it is what makes the folder a port that a killed run can go on with."""
    from gemma_neuron.checkpoint.source import write_small_files

    port, record = prepared.port, prepared.record
    known = port.record if (port.path / RECORD_NAME).is_file() else None
    if record.compile is None and known is not None:
        record = record.model_copy(update={"compile": known.compile, "versions": known.versions})
    if known is None or known != record:
        port.write_record(record)
    names = write_small_files(prepared.small, port.source_folder)
    port.source_set.commit(names)
    write_json_atomic(port.path / "audit.json", prepared.audit.report.to_json())
    write_json_atomic(port.path / "plan.json", asdict(prepared.plan))
