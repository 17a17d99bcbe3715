"""Rank files cut, compared if asked for, and accounted for; what the accounting refuses is cut once more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gemma_neuron.errors import IntegrityError
from gemma_neuron.pipeline.inspecting import account_for_ranks
from gemma_neuron.pipeline.prepare import Prepared

if TYPE_CHECKING:
    from gemma_neuron.sharding.derived import Frequencies
    from gemma_neuron.sharding.progress import Progress
    from gemma_neuron.sharding.writer import ShardedCheckpoint


def cut_and_counted(
    prepared: Prepared,
    progress: Progress | None,
    *,
    verify: bool = False,
    frequencies: Frequencies | None = None,
) -> tuple[ShardedCheckpoint, int | None]:
    """The ranks, and with `verify` how many tensors of them equal the checkpoint.

    A rank that was committed before and that the accounting refuses is written again; with `verify` nothing is mended:
    the first wrong byte is named instead.
    """
    sharded = _written(prepared, progress, verify, frequencies)
    compared = _verified(prepared, progress) if verify else None
    try:
        account_for_ranks(prepared.port)
    except IntegrityError:
        if verify or not _withdrawn(prepared, sharded):
            raise
        again = _written(prepared, progress, verify)
        account_for_ranks(prepared.port)
        written = tuple(sorted({*sharded.written, *again.written}))
        sharded = replace(again, written=written)
    return sharded, compared


def _withdrawn(prepared: Prepared, sharded: ShardedCheckpoint) -> bool:
    """Whether ranks of an earlier run were what the accounting refused; they count no more."""
    from gemma_neuron.checkpoint.rank_files import audit_ranks

    port = prepared.port
    refused = {finding.file for finding in audit_ranks(port).errors}
    reused = [rank for rank in range(sharded.ranks) if rank not in sharded.written]
    ranks = [rank for rank in reused if port.rank_file(rank).name in refused]
    for rank in ranks:
        port.rank_set(rank).withdraw()
    return bool(ranks)


def _written(
    prepared: Prepared,
    progress: Progress | None,
    verify: bool,
    frequencies: Frequencies | None = None,
) -> ShardedCheckpoint:
    from gemma_neuron.sharding.derived import Derived
    from gemma_neuron.sharding.writer import write_ranks

    assert prepared.audit.geometry is not None
    return write_ranks(
        prepared.port,
        prepared.plan,
        prepared.audit.tensors(),
        prepared.audit.states,
        str(prepared.source),
        progress,
        derived=Derived(prepared.audit.geometry, frequencies),
        reads_again=verify,
    )


def _verified(prepared: Prepared, progress: Progress | None) -> int:
    from gemma_neuron.sharding.verify import verify_ranks

    assert prepared.audit.geometry is not None
    return verify_ranks(
        prepared.port,
        prepared.audit.geometry,
        prepared.plan,
        prepared.audit.tensors(),
        prepared.audit.states,
        progress,
    )
