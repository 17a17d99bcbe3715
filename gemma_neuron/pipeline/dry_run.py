"""`compile --dry-run`: what the compiler would be given, and nothing else."""

from __future__ import annotations

from gemma_neuron.backends.registry import backend
from gemma_neuron.errors import UsageError
from gemma_neuron.pipeline.host import host_budget
from gemma_neuron.pipeline.prepare import prepare
from gemma_neuron.pipeline.request import CompileRequest
from gemma_neuron.pipeline.sources import UNWATCHED, Watch
from gemma_neuron.port import RECORD_NAME


def dry_run(source_text: str, request: CompileRequest, watch: Watch = UNWATCHED) -> tuple[str, ...]:
    """Each graph and the compiler's flags below `--out`; the files' names. Raises UsageError when that is a port."""
    from gemma_neuron.compilation.compiler import parts_of, trace_only

    if (request.out / RECORD_NAME).exists():
        raise UsageError(
            f"--out {request.out} is a port; a dry run makes none.", "Name another folder."
        )
    chosen = backend(request.backend)
    chosen.require()
    prepared = prepare(source_text, request, chosen, watch, makes_port=False)
    geometry, spec = prepared.audit.geometry, prepared.record.compile
    assert geometry is not None and spec is not None
    parts = parts_of(spec.graphs(), prepared.port, geometry, prepared.plan, spec)
    return trace_only(parts, request.out, chosen, host_budget(request.host_memory))
