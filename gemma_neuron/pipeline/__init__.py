"""The order of the stages, and what of an earlier run can be reused. The only package that knows it.

inspect → plan → shard → compile → validate. Each function here goes as far as its command asks, and
whatever is committed already is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.backends.base import Runner
from gemma_neuron.backends.registry import backend
from gemma_neuron.compilation.buckets import choose_buckets, choose_context, choose_slots
from gemma_neuron.pipeline.compiling import compile_port
from gemma_neuron.pipeline.host import host_budget, own_peak
from gemma_neuron.pipeline.inspecting import inspected
from gemma_neuron.pipeline.prepare import only_worker, prepare, show_warnings
from gemma_neuron.pipeline.request import CompileRequest, PlanOptions, PortResult, run_dtype
from gemma_neuron.pipeline.sharding import cut_and_counted
from gemma_neuron.pipeline.sources import (
    UNWATCHED,
    Watch,
    examined,
    fetched,
    folder_of,
    open_any,
)
from gemma_neuron.port import Port
from gemma_neuron.unchanged import FilesBefore

if TYPE_CHECKING:
    from gemma_neuron.reports import ValidationReport
    from gemma_neuron.sharding.candidates import Planned
    from gemma_neuron.sharding.progress import Progress
    from gemma_neuron.tuning.merge import Merged
    from gemma_neuron.validation.export import GoldenOptions, GoldenReport
    from gemma_neuron.validation.validator import Options

__all__ = [
    "CompileRequest",
    "PlanOptions",
    "PortResult",
    "compile_port",
    "examined",
    "golden_file",
    "inspected",
    "merged_checkpoint",
    "open_port",
    "planned",
    "runner_factory",
    "shard",
    "validate_port",
]
Notice = Callable[[str], None]


def planned(source_text: str, request: PlanOptions, watch: Watch = UNWATCHED) -> Planned:
    """`plan`: needs config.json only."""
    from gemma_neuron.checkpoint.source import read_config
    from gemma_neuron.instances import instance as find_instance
    from gemma_neuron.models.registry import read_geometry, read_parameter_table
    from gemma_neuron.sharding.candidates import PlanRequest
    from gemma_neuron.sharding.planner import make_plan

    geometry = read_geometry(read_config(open_any(source_text, watch, config_only=True)))
    context = choose_context(geometry, request.max_context)
    instance = find_instance(request.instance)
    budget = host_budget(request.host_memory, instance)
    asked = PlanRequest(
        instance=instance,
        tp=request.tp,
        context=context,
        slots=choose_slots(request.slots, default=1),
        buckets=choose_buckets(request.buckets, context),
        strategy=request.strategy,
        host_budget=budget.bytes,
        host_origin=budget.origin,
    )
    table = read_parameter_table(geometry)
    return make_plan(geometry, table, asked, backend("neuron").host_bytes)


def shard(
    source_text: str,
    request: CompileRequest,
    progress: Progress | None,
    notice: Notice = lambda _: None,
    watch: Watch = UNWATCHED,
    *,
    verify: bool = False,
) -> PortResult:
    """Audit, plan and write rank files; committed ranks are kept.

    `verify`: then put the ranks together again and compare them with the checkpoint, byte for byte.
    """
    from gemma_neuron.sharding.derived import Frequencies

    started = time.monotonic()
    frequencies = Frequencies().begin()
    prepared = prepare(source_text, request, None, watch)
    show_warnings(prepared.record.warnings, notice)
    with only_worker(prepared):
        sharded, compared = cut_and_counted(
            prepared, progress, verify=verify, frequencies=frequencies
        )
    record = prepared.port.record
    return PortResult(
        port=prepared.port.path,
        digest=prepared.port.contents_digest(),
        total=sharded.ranks,
        built=len(sharded.written),
        reused=sharded.ranks - len(sharded.written),
        seconds=time.monotonic() - started,
        host_peak_bytes=own_peak(),
        output_bytes=sharded.output_bytes,
        warnings=record.warnings,
        verified_tensors=compared,
    )


def open_port(path: Path, notice: Notice = lambda _: None) -> Port:
    """A compiled port whose front is what was committed; `notice` is told the audit's warnings.

    Raises PortIncompleteError when the folder is none or has no graphs yet, IntegrityError when config,
    tokenizer, template or plan are not those it was compiled with.
    """
    port = Port(path)
    assert port.spec is not None
    port.source_set.verify()
    assert port.plan is not None
    show_warnings(port.record.warnings, notice)
    return port


def runner_factory(port: Port) -> Callable[[], Runner]:
    """What loads the port on the back end it was compiled for, when called."""
    return lambda: backend(port.spec.backend).load(port)


def replica_loader(port: Port, count: int = 1) -> tuple[Callable[[int], Runner], tuple[str, ...]]:
    """What loads a replica of the port in another process, by its index, and the modules it needs there.

    Raises DoesNotFitError when this machine cannot hold `count` of them.
    """
    chosen = backend(port.spec.backend)
    chosen.require_room(port, count)
    return partial(load_replica, port.path.resolve()), chosen.preload


def keeps_devices(port: Port) -> bool:
    """See `Backend.keeps_devices`, of the one the port was compiled for."""
    return backend(port.spec.backend).keeps_devices


def load_replica(path: Path, index: int) -> Runner:
    """Replica `index` of the port at `path`. Raises what `Backend.load` raises."""
    port = Port(path)
    return backend(port.spec.backend).load(port, index)


def validate_port(
    path: Path,
    checkpoint: str | None,
    options: Options,
    *,
    notice: Notice,
    progress: Notice,
    watch: Watch = UNWATCHED,
) -> ValidationReport:
    """Load a port and judge it. The checkpoint defaults to where the port was made from, if it is there."""
    from gemma_neuron.backends.cpu.hidden import hidden_states
    from gemma_neuron.validation.validator import require_inputs, validate

    require_inputs(options)
    before = FilesBefore.of(Port(path).files())
    port = open_port(path)
    given = fetched(checkpoint, watch)[0].folder if checkpoint is not None else None
    source = given or folder_of(port.record.source, watch)
    notice(f"checkpoint: {source or 'not at hand, a golden is needed'}")
    runner = runner_factory(port)()
    try:
        given_source = replace(options, checkpoint=source)
        hidden = partial(hidden_states, port)
        return validate(port, runner, given_source, hidden=hidden, before=before, progress=progress)
    finally:
        runner.close()


def golden_file(
    source_text: str,
    options: GoldenOptions,
    *,
    notice: Notice,
    progress: Notice,
    watch: Watch = UNWATCHED,
) -> GoldenReport:
    """`golden`: a reference from the checkpoint alone."""
    from gemma_neuron.validation.export import export_golden

    dtype = run_dtype(options.dtype, options.dtype)
    source, audit = fetched(source_text, watch)
    warnings = audit.report.warning_lines
    show_warnings(warnings, notice)
    made = export_golden(
        source.folder,
        replace(options, dtype=dtype),
        checkpoint_digest=audit.report.checkpoint_digest,
        progress=progress,
    )
    return replace(made, warnings=warnings)


def merged_checkpoint(
    source_text: str, adapter: Path, out: Path, notice: Notice, watch: Watch = UNWATCHED
) -> Merged:
    """`merge`: an adapter into its base. The result is audited before it is called done."""
    from gemma_neuron.tuning.adapter import read_adapter
    from gemma_neuron.tuning.merge import merge_adapter

    source, audit = fetched(source_text, watch)
    assert audit.geometry is not None and audit.table is not None
    merged = merge_adapter(
        source.folder,
        audit.tensors(),
        read_adapter(adapter, audit.table),
        out,
        value_is_key=[layer.index for layer in audit.geometry.layers if layer.value_is_key],
        progress=notice,
    )
    examined(open_any(str(out), watch))
    return merged
