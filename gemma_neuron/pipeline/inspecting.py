"""`inspect`: a checkpoint against its model, or a port's rank files against plan and checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.names import path_of
from gemma_neuron.pipeline.sources import UNWATCHED, Watch, fetch, open_any
from gemma_neuron.port import RECORD_NAME, Port

if TYPE_CHECKING:
    from gemma_neuron.checkpoint.scan import Progress
    from gemma_neuron.reports import AuditReport


def inspected(
    text: str, *, values: bool, progress: Progress | None = None, watch: Watch = UNWATCHED
) -> AuditReport:
    """The report on a SOURCE, or on a port after `shard`. Raises what opening either raises.

    Of a remote source headers and buffers are read by ranges; `values` needs all bytes, so it is downloaded, unless
    its structure is broken already.
    """
    from gemma_neuron.checkpoint.audit import audit
    from gemma_neuron.checkpoint.rank_files import audit_ranks

    folder = path_of(text)
    if (folder / RECORD_NAME).is_file():
        return audit_ranks(Port(folder), values=values, progress=progress)
    source = open_any(text, watch)
    if values and source.files.remote:
        structure = audit(source)
        if structure.errors:
            watch.tell("the structure is broken: nothing was downloaded, no values were looked at")
            return structure
        fetch(source, watch)
    return audit(source, values=values, progress=progress)


def account_for_ranks(port: Port) -> None:
    """Close the ledger after `shard` and keep it in the port. Raises IntegrityError naming what does not add up."""
    from gemma_neuron.checkpoint.rank_files import AUDIT_NAME, require_ranks

    write_json_atomic(port.path / AUDIT_NAME, require_ranks(port).to_json())
