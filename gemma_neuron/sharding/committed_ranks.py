"""Which ranks of an earlier run still count: committed as this plan's, with the bytes that were committed.

What does not count is withdrawn, so that it is written again: nothing is reused that the accounting of ranks refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemma_neuron.artifacts import CHUNK_BYTES, require_no_folder
from gemma_neuron.errors import IntegrityError
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from gemma_neuron.sharding.cuts import cut_of
from gemma_neuron.sharding.progress import Progress
from gemma_neuron.sharding.rank_layout import RankTensor, file_bytes, header_bytes, rank_facts
from gemma_neuron.sharding.source_files import SourceFiles


def missing_ranks(
    port: Port, plan: ShardPlan, tensors: Sequence[RankTensor], progress: Progress | None
) -> list[int]:
    """Ranks that are not committed or count no more. Raises IntegrityError where a folder is in a marker's place."""
    for rank in range(plan.tp):
        require_no_folder(port.rank_set(rank).marker_path)
        require_no_folder(port.rank_set(rank).manifest_path)
    committed = [rank for rank in range(plan.tp) if port.rank_set(rank).marker_path.is_file()]
    files = {rank: port.rank_file(rank) for rank in committed}
    sizes = {rank: f.stat().st_size if f.is_file() else 0 for rank, f in files.items()}
    if progress is not None and committed:
        progress.begin("checking ranks", sum(sizes.values()))
    for rank in tuple(committed):
        if not _counts(port, plan, tensors, rank):
            port.rank_set(rank).withdraw()
            committed.remove(rank)
        if progress is not None:
            progress(sizes[rank], rank)
    return [rank for rank in range(plan.tp) if rank not in committed]


def _counts(port: Port, plan: ShardPlan, tensors: Sequence[RankTensor], rank: int) -> bool:
    path, header = port.rank_file(rank), header_bytes(tensors, rank, plan.tp)
    if path.is_symlink():  # a port holds its own bytes
        return False
    try:
        manifest = port.rank_set(rank).verify()
    except IntegrityError:
        return False
    committed = [(entry.name, entry.bytes) for entry in manifest.files]
    if committed != [(path.name, file_bytes(tensors, rank, plan.tp))]:
        return False
    if manifest.facts != rank_facts(plan, rank):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def withdraw_other_cuts(
    port: Port,
    plan: ShardPlan,
    tensors: Sequence[RankTensor],
    files: SourceFiles,
    ranks: Sequence[int],
) -> list[int]:
    """Those of the committed `ranks` whose bytes are not the checkpoint's: they count no more."""
    others = [rank for rank in ranks if not _is_cut_from(port, plan, tensors, files, rank)]
    files.require_unchanged()
    for rank in others:
        port.rank_set(rank).withdraw()
    return others


def _is_cut_from(
    port: Port, plan: ShardPlan, tensors: Sequence[RankTensor], files: SourceFiles, rank: int
) -> bool:
    with TensorFile(port.rank_file(rank)) as held:
        for tensor in tensors:
            if tensor.source is None:
                continue
            cut = cut_of(tensor.source, tensor.parameter.placement, rank, plan.tp)
            for first in range(0, cut.bytes, CHUNK_BYTES):
                found = held.read(tensor.parameter.name, first, min(CHUNK_BYTES, cut.bytes - first))
                wanted = np.empty_like(found)
                files.read_cut(tensor.source.file, cut, first, wanted.data)
                if not np.array_equal(found, wanted):
                    return False
    return True
