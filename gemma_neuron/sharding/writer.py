"""Cut a checkpoint into one safetensors file a rank, streaming; each rank committed by its own marker.

In: where each tensor's bytes lie, and the plan. Out: `weights/rank-NN.safetensors`, manifests and markers, and
`source.json`. Memory: a few pieces of `CHUNK_BYTES`. A killed run goes on with the first rank that is not committed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from gemma_neuron.artifacts import CHUNK_BYTES, PARTIAL_SUFFIX, FileEntry, remove, sync_folder
from gemma_neuron.errors import DiskFullError, EnvironmentProblem, IntegrityError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.plan import PlannedParameter, ShardPlan
from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from gemma_neuron.regular_files import FileState
from gemma_neuron.sharding.cuts import ITEM_BYTES, TensorSource, cut_of
from gemma_neuron.sharding.outlet import Outlet, Pieces
from gemma_neuron.sharding.source_files import SourceFiles
from gemma_neuron.sharding.source_record import SourceDigests

DERIVED_DTYPES = {"float32": "F32", "int32": "I32"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Progress(Protocol):
    """Who looks on while bytes move."""

    def begin(self, label: str, total: int) -> None:
        """A stage of `total` bytes."""

    def __call__(self, count: int, of: int | str) -> None:
        """`count` more bytes are done, of a rank or of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCheckpoint:
    """What `write_ranks` left. `written`: ranks of this run; the others were there."""

    ranks: int
    written: tuple[int, ...]
    output_bytes: int


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One tensor of a rank file: its header entry and where its bytes come from."""

    parameter: PlannedParameter
    dtype: str
    bytes: int
    source: TensorSource | None


def write_ranks(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    sources: Mapping[str, TensorSource],
    states: Mapping[Path, FileState],
    seen_at: str,
    progress: Progress | None = None,
) -> ShardedCheckpoint:
    """Write every rank that is not committed, and `source.json`; `seen_at` says where the source lies.

    `states`: the files of `sources` as they were when they were audited.

    Raises IntegrityError, EnvironmentProblem (disk, read error), PortMismatchError or SourceChangedError.
    """
    port.weights_folder.mkdir(parents=True, exist_ok=True)
    tensors = rank_tensors(plan, sources)
    with (
        SourceFiles(states) as files,
        SourceDigests(port, files, sources, seen_at) as digests,
    ):
        missing = _missing(port, plan.tp, progress)
        if not digests.ranks_are_of_these:
            missing = [
                rank
                for rank in range(plan.tp)
                if rank in missing or not _is_cut_from(files, tensors, port, rank, plan.tp)
            ]
        if missing:
            _require_room(port.weights_folder, _file_bytes(tensors, 0, plan.tp) * len(missing))
            cutter = _Cutter(port, geometry, plan, tensors, files, digests, progress)
            cutter.write(missing)
        digests.finish()
    total = sum(port.rank_file(rank).stat().st_size for rank in range(plan.tp))
    return ShardedCheckpoint(ranks=plan.tp, written=tuple(missing), output_bytes=total)


def _missing(port: Port, tp: int, progress: Progress | None) -> list[int]:
    """Ranks that are not committed, or whose bytes are no longer what was committed: those count no more."""
    committed = [rank for rank in range(tp) if port.rank_set(rank).marker_path.is_file()]
    files = {rank: port.rank_file(rank) for rank in committed}
    sizes = {rank: f.stat().st_size if f.is_file() else 0 for rank, f in files.items()}
    if progress is not None and committed:
        progress.begin("checking ranks", sum(sizes.values()))
    for rank in tuple(committed):
        try:
            port.rank_set(rank).verify()
        except IntegrityError:
            port.rank_set(rank).withdraw()
            committed.remove(rank)
        if progress is not None:
            progress(sizes[rank], rank)
    return [rank for rank in range(tp) if rank not in committed]


def _is_cut_from(
    files: SourceFiles, tensors: Sequence[RankTensor], port: Port, rank: int, tp: int
) -> bool:
    """Whether a committed rank's bytes are the checkpoint's; if not, it counts no more."""
    with TensorFile(port.rank_file(rank)) as held:
        for tensor in tensors:
            if tensor.source is None:
                continue
            cut = cut_of(tensor.source, tensor.parameter.placement, rank, tp)
            for first in range(0, cut.bytes, CHUNK_BYTES):
                found = held.read(tensor.parameter.name, first, min(CHUNK_BYTES, cut.bytes - first))
                wanted = np.empty_like(found)
                files.read_cut(tensor.source.file, cut, first, wanted.data)
                if not np.array_equal(found, wanted):
                    port.rank_set(rank).withdraw()
                    return False
    return True


def _require_room(folder: Path, needed: int) -> None:
    """Refuse what cannot fit before it takes minutes to find out."""
    free = _free(folder)
    if needed > free:
        raise DiskFullError(
            f"The rank files to be written take {needed:,} bytes; {free:,} are free at {folder}.",
            "Free some room, or name an --out on another disk.",
        )


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _disk_error(folder: Path, error: OSError) -> EnvironmentProblem:
    """What the user needs to know of an OSError of writing: where, why, and what is free."""
    kind = DiskFullError if error.errno in FULL else EnvironmentProblem
    return kind(
        f"Writing rank files to {folder} failed: {error.strerror or error}; "
        f"{_free(folder):,} bytes are free there.",
        "Free some room (or raise the quota or file size limit) and run the same command; committed ranks stay.",
    )


def rank_tensors(plan: ShardPlan, sources: Mapping[str, TensorSource]) -> list[RankTensor]:
    """The tensors of every rank file, in file order: shapes and dtypes are the same on all ranks."""
    found = []
    for parameter in plan.parameters:
        source = None if parameter.derived else sources[parameter.name]
        dtype = DERIVED_DTYPES[str(parameter.dtype)] if source is None else source.dtype
        size = ITEM_BYTES[dtype]
        for length in parameter.local_shape:
            size *= length
        found.append(RankTensor(parameter, dtype, size, source))
    return found


def header_bytes(tensors: Sequence[RankTensor], rank: int, tp: int) -> bytes:
    """A safetensors header: 8 bytes of length, then JSON padded with spaces to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"rank": str(rank), "tp": str(tp)}}
    offset = 0
    for tensor in tensors:
        entries[tensor.parameter.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.parameter.local_shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _file_bytes(tensors: Sequence[RankTensor], rank: int, tp: int) -> int:
    return len(header_bytes(tensors, rank, tp)) + sum(tensor.bytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Cutter:
    port: Port
    geometry: ModelGeometry
    plan: ShardPlan
    tensors: Sequence[RankTensor]
    files: SourceFiles
    digests: SourceDigests
    progress: Progress | None

    def write(self, ranks: Sequence[int]) -> None:
        if self.progress is not None:
            sizes = (_file_bytes(self.tensors, rank, self.plan.tp) for rank in ranks)
            self.progress.begin("shard", sum(sizes))
        with Pieces() as pieces:
            for rank in ranks:
                try:
                    self._write_rank(rank, pieces)
                except OSError as error:
                    raise _disk_error(self.port.weights_folder, error) from error

    def _write_rank(self, rank: int, pieces: Pieces) -> None:
        target = self.port.rank_file(rank)
        partial = target.with_name(target.name + PARTIAL_SUFFIX)
        self.files.require_unchanged()
        size = _file_bytes(self.tensors, rank, self.plan.tp)
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
        facts = {"plan": self.plan.fingerprint(), "rank": rank, "tp": self.plan.tp}
        self.port.rank_set(rank).commit_entries((entry,), facts)

    def _fill(self, outlet: Outlet, rank: int) -> None:
        self._put(outlet, header_bytes(self.tensors, rank, self.plan.tp), rank)
        for tensor in self.tensors:
            if tensor.source is None:
                self._put(outlet, derived_bytes(tensor.parameter, self.geometry, rank), rank)
                continue
            cut = cut_of(tensor.source, tensor.parameter.placement, rank, self.plan.tp)
            assert cut.bytes == tensor.bytes, tensor.parameter.name
            done = 0
            while done < cut.bytes:
                room = outlet.room()[: cut.bytes - done]
                self.files.read_cut(tensor.source.file, cut, done, room)
                done += self._filled(outlet, len(room), rank)

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


def derived_bytes(parameter: PlannedParameter, geometry: ModelGeometry, rank: int) -> bytes:
    """A derived tensor's bytes: the rank's number, or a layer kind's rotary frequencies."""
    from gemma_neuron.models.rotary import inverse_frequencies

    if parameter.placement.kind == "rank":
        return rank.to_bytes(4, "little")
    kind = parameter.name.split(".")[1]
    assert kind in ("sliding", "global"), parameter.name
    layer = geometry.layer_of_kind("sliding" if kind == "sliding" else "global")
    assert layer is not None
    return inverse_frequencies(geometry.rope[layer.kind], layer.head_dim).numpy().tobytes()
