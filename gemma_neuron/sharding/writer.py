"""Cut a checkpoint into one safetensors file a rank, streaming; each rank committed by its own marker.

In: where each tensor's bytes lie, and the plan. Out: `weights/rank-NN.safetensors`, manifests and markers, and
`source.json`. Memory: a few pieces of `CHUNK_BYTES`. A killed run goes on with the first rank that is not committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.artifacts import (
    PARTIAL_SUFFIX,
    FileEntry,
    free_bytes,
    remove,
    sync_folder,
    writing_failed,
)
from gemma_neuron.errors import DiskFullError
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Port
from gemma_neuron.regular_files import FileState
from gemma_neuron.sharding.committed_ranks import missing_ranks, withdraw_other_cuts
from gemma_neuron.sharding.cuts import Cut, TensorSource, cut_of
from gemma_neuron.sharding.derived import Derived
from gemma_neuron.sharding.outlet import Outlet, Pieces
from gemma_neuron.sharding.progress import Progress
from gemma_neuron.sharding.rank_layout import (
    RankTensor,
    file_bytes,
    header_bytes,
    rank_facts,
    rank_tensors,
)
from gemma_neuron.sharding.read_ahead import ReadAhead
from gemma_neuron.sharding.source_files import SourceFiles
from gemma_neuron.sharding.source_record import SourceDigests


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCheckpoint:
    """What `write_ranks` left. `written`: ranks of this run; the others were there."""

    ranks: int
    written: tuple[int, ...]
    output_bytes: int


def write_ranks(
    port: Port,
    plan: ShardPlan,
    sources: Mapping[str, TensorSource],
    states: Mapping[Path, FileState],
    seen_at: str,
    progress: Progress | None = None,
    *,
    derived: Derived,
    reads_again: bool = False,
) -> ShardedCheckpoint:
    """Write every rank that is not committed, and `source.json`; `seen_at` says where the source lies.

    `states`: the files of `sources` as they were when they were audited. `reads_again`: digests of an earlier
    run are compared with the files' own.

    Raises IntegrityError, EnvironmentProblem (disk, read error), PortMismatchError or SourceChangedError.
    """
    try:
        port.weights_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise writing_failed(port.weights_folder, error) from error
    tensors = rank_tensors(plan, sources)
    with (
        SourceFiles(states) as files,
        SourceDigests(port, files, sources, seen_at, again=reads_again) as digests,
    ):
        missing = missing_ranks(port, plan, tensors, progress)
        if not digests.ranks_are_of_these:
            there = [rank for rank in range(plan.tp) if rank not in missing]
            missing += withdraw_other_cuts(port, plan, tensors, files, there)
            missing.sort()
            digests.begin()
        if missing:
            _require_room(port.weights_folder, file_bytes(tensors, 0, plan.tp) * len(missing))
            cutter = _Cutter(port, plan, tensors, derived, files, digests, progress)
            cutter.write(missing)
        digests.finish()
    total = sum(port.rank_file(rank).stat().st_size for rank in range(plan.tp))
    return ShardedCheckpoint(ranks=plan.tp, written=tuple(missing), output_bytes=total)


def _require_room(folder: Path, needed: int) -> None:
    """Refuse what cannot fit before it takes minutes to find out."""
    free = free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"The rank files to be written take {needed:,} bytes; {free:,} are free at {folder}.",
            "Free some room, or name an --out on another disk.",
        )


@dataclass(frozen=True, slots=True)
class _Cutter:
    port: Port
    plan: ShardPlan
    tensors: Sequence[RankTensor]
    derived: Derived
    files: SourceFiles
    digests: SourceDigests
    progress: Progress | None

    def write(self, ranks: Sequence[int]) -> None:
        if self.progress is not None:
            sizes = (file_bytes(self.tensors, rank, self.plan.tp) for rank in ranks)
            self.progress.begin("shard", sum(sizes))
        with Pieces() as pieces:
            for rank in ranks:
                try:
                    self._write_rank(rank, pieces)
                except OSError as error:
                    raise writing_failed(self.port.weights_folder, error) from error

    def _write_rank(self, rank: int, pieces: Pieces) -> None:
        target = self.port.rank_file(rank)
        partial = target.with_name(target.name + PARTIAL_SUFFIX)
        self.files.require_unchanged()
        size = file_bytes(self.tensors, rank, self.plan.tp)
        outlet = Outlet(partial, size, pieces)
        try:
            self._fill(outlet, rank)
            digest = outlet.finish()
            self.files.require_unchanged()
            self.digests.require_well()
        except BaseException:
            outlet.abandon()
            raise
        if target.is_dir():
            remove(target)
        partial.replace(target)
        sync_folder(target.parent)
        entry = FileEntry(name=target.name, bytes=size, blake3=digest)
        self.port.rank_set(rank).commit_entries((entry,), rank_facts(self.plan, rank))

    def _fill(self, outlet: Outlet, rank: int) -> None:
        self._put(outlet, header_bytes(self.tensors, rank, self.plan.tp), rank)
        ahead = ReadAhead(self.files, self._cuts(rank))
        before = 0
        for tensor in self.tensors:
            if tensor.source is None:
                self._put(outlet, self.derived.bytes(tensor.parameter, rank), rank)
                continue
            cut = cut_of(tensor.source, tensor.parameter.placement, rank, self.plan.tp)
            assert cut.bytes == tensor.bytes, tensor.parameter.name
            done = 0
            while done < cut.bytes:
                ahead.at(before + done)
                room = outlet.room()[: cut.bytes - done]
                self.files.read_cut(tensor.source.file, cut, done, room)
                done += self._filled(outlet, len(room), rank)
            before += done

    def _cuts(self, rank: int) -> Iterator[tuple[Path, Cut]]:
        for tensor in self.tensors:
            if tensor.source is not None:
                placement = tensor.parameter.placement
                yield tensor.source.file, cut_of(tensor.source, placement, rank, self.plan.tp)

    def _put(self, outlet: Outlet, data: bytes, rank: int) -> None:
        while data:
            room = outlet.room()[: len(data)]
            room[:] = data[: len(room)]
            data = data[self._filled(outlet, len(room), rank) :]

    def _filled(self, outlet: Outlet, count: int, rank: int) -> int:
        outlet.filled(count)
        if self.progress is not None:
            self.progress(count, rank)
        return count
