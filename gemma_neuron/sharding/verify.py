"""`shard --verify`: the ranks, put together again, are the checkpoint, byte for byte, buffers and copies included."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_neuron.errors import IntegrityError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.plan import PlannedParameter, ShardPlan
from gemma_neuron.port import Port
from gemma_neuron.reassembly import Bytes, Difference, TensorFile, Whole, wholes
from gemma_neuron.regular_files import FileState
from gemma_neuron.sharding.cuts import TensorSource
from gemma_neuron.sharding.derived import Derived
from gemma_neuron.sharding.progress import Progress
from gemma_neuron.sharding.source_files import SourceFiles

SHOWN = 3


def verify_ranks(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    sources: Mapping[str, TensorSource],
    states: Mapping[Path, FileState],
    progress: Progress | None = None,
) -> int:
    """Compare every tensor of every rank with the checkpoint; how many tensors were compared.

    The ranks' names and shapes are as planned already. Raises IntegrityError naming tensor, rank and first
    differing byte, and what SourceFiles raises.
    """
    found: list[Difference] = []
    derived = Derived(geometry)
    with ExitStack() as stack:
        files = stack.enter_context(SourceFiles(states))
        ranks = [stack.enter_context(TensorFile(port.rank_file(rank))) for rank in range(plan.tp)]
        if progress is not None:
            progress.begin("verify", sum(t.bytes for r in ranks for t in r.tensors.values()))
        for parameter in plan.parameters:
            wanted = _Wanted(files, parameter, sources.get(parameter.name), derived, progress)
            differences = (wanted.compared_with(w) for w in wholes(parameter, ranks, plan.tp))
            found += [difference for difference in differences if difference is not None]
        files.require_unchanged()
    if found:
        shown = "; ".join(map(str, found[:SHOWN]))
        more = f" (and {len(found) - SHOWN} more tensors)" if len(found) > SHOWN else ""
        rank = port.rank_set(found[0].rank)
        raise IntegrityError(
            f"{port.path} is not the checkpoint it was cut from: {shown}{more}.",
            f"Remove {rank.marker_path} (one for each such rank) and run the same command again.",
        )
    return len(plan.parameters)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a tensor should be: the checkpoint's bytes, or those that are derived for a rank."""

    files: SourceFiles
    parameter: PlannedParameter
    source: TensorSource | None
    derived: Derived
    progress: Progress | None

    def compared_with(self, whole: Whole) -> Difference | None:
        if self.source is not None:
            return whole.first_difference(self._of_checkpoint)
        data = self.derived.bytes(self.parameter, whole.ranks[0])
        derived = np.frombuffer(data, np.uint8)
        return whole.first_difference(lambda offset, count: derived[offset : offset + count])

    def _of_checkpoint(self, offset: int, count: int) -> Bytes:
        assert self.source is not None
        room = np.empty(count, np.uint8)
        self.files.read_into(self.source.file, room.data, self.source.start + offset)
        if self.progress is not None:
            self.progress(count, self.parameter.name)
        return room
