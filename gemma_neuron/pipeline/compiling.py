"""`compile`: a checkpoint made into a port whose graphs are built, here or on the machines of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from gemma_neuron.backends.base import Backend
from gemma_neuron.backends.registry import backend
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.metadata import InstanceMetadata
from gemma_neuron.elastic.notice import Notices
from gemma_neuron.pipeline.host import own_peak, require_budget
from gemma_neuron.pipeline.mirroring import mirrored
from gemma_neuron.pipeline.prepare import Prepared, only_worker, prepare, show_warnings
from gemma_neuron.pipeline.request import CompileRequest, PortResult
from gemma_neuron.pipeline.sharding import cut_and_counted
from gemma_neuron.pipeline.sources import UNWATCHED, Watch

if TYPE_CHECKING:
    from gemma_neuron.compilation.workshop import Workshop
    from gemma_neuron.sharding.progress import Progress

Notice = Callable[[str], None]
Opened = Callable[[Prepared], "Workshop"]


def compile_port(
    source_text: str,
    request: CompileRequest,
    progress: Progress | None,
    notice: Notice,
    watch: Watch = UNWATCHED,
) -> PortResult:
    """Audit, plan, shard and compile; toolchain and cluster are looked at before anything long starts."""
    chosen = backend(request.backend)
    chosen.require()
    with (
        Notices(InstanceMetadata.here(), notice) as notices,
        _opening(request, chosen) as opened,
    ):
        return _compiled(source_text, request, opened, progress, notice, watch, notices)


@contextmanager
def _opening(request: CompileRequest, chosen: Backend) -> Iterator[Opened]:
    """What opens the workshop once it is known what is to be compiled; a cluster is joined before that."""
    if request.cluster is None:
        from gemma_neuron.compilation.workshop import Here

        yield lambda prepared: Here(chosen, require_budget(prepared, request, chosen))
        return
    from gemma_neuron.pipeline.cluster import Cluster

    with closing(Cluster(request, chosen)) as cluster:
        yield cluster.opened


def _compiled(
    source_text: str,
    request: CompileRequest,
    opened: Opened,
    progress: Progress | None,
    notice: Notice,
    watch: Watch,
    notices: Notices,
) -> PortResult:
    from gemma_neuron.compilation.compiler import compile_units

    started = time.monotonic()
    chosen = backend(request.backend)
    prepared = prepare(source_text, request, chosen, watch)
    show_warnings(prepared.record.warnings, notice)
    geometry, port = prepared.audit.geometry, prepared.port
    assert geometry is not None
    workshop = opened(prepared)
    with (
        only_worker(prepared),
        mirrored(port, request.mirror, notice, notices) as take_more,
    ):
        notices.events = EventLog(
            lambda event, facts: port.append("events.jsonl", {"event": event} | facts)
        )
        sharded, _ = cut_and_counted(prepared, progress)
        compiled = compile_units(
            port,
            geometry,
            prepared.plan,
            chosen,
            workshop,
            notices,
            request.limits,
            take_more,
        )
        port.require_digest(request.expect_digest)
    return PortResult(
        port=port.path,
        digest=port.contents_digest(),
        total=compiled.total,
        built=len(compiled.built),
        reused=len(compiled.reused),
        seconds=time.monotonic() - started,
        host_peak_bytes=max(compiled.host_peak_bytes, own_peak()),
        output_bytes=sharded.output_bytes + compiled.output_bytes,
        warnings=port.record.warnings,
        unit_peaks=compiled.unit_peaks,
        retries=compiled.retries,
        downtime_seconds=compiled.downtime_seconds,
    )
