"""Cut a checkpoint into one safetensors file a rank, streaming; each rank committed by its own marker.

In: where each tensor's bytes lie, and the plan. Out: `weights/rank-NN.safetensors`, manifests and markers.
Memory: one piece of at most `CHUNK_BYTES`. A killed run goes on with the first rank that is not committed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from gemma_neuron.artifacts import PARTIAL_SUFFIX, CommittedSet, FileEntry, remove, sync_folder
from gemma_neuron.errors import EnvironmentProblem, IntegrityError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.plan import PlannedParameter, ShardPlan
from gemma_neuron.port import Port
from gemma_neuron.sharding.cuts import ITEM_BYTES, TensorSource, rank_bytes, whole_bytes

DERIVED_DTYPES = {"float32": "F32", "int32": "I32"}
Progress = Callable[[int, int], None]
"""Called with (bytes just written, rank)."""


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
    progress: Progress | None = None,
) -> ShardedCheckpoint:
    """Write every rank that is not committed. Raises IntegrityError, EnvironmentProblem (disk)."""
    port.weights_folder.mkdir(parents=True, exist_ok=True)
    tensors = rank_tensors(plan, sources)
    written = []
    for rank in range(plan.tp):
        if not _is_whole(port, rank):
            with _DiskErrors(port.weights_folder):
                _write_rank(port, geometry, plan, tensors, rank, progress)
            written.append(rank)
    total = sum(port.rank_file(rank).stat().st_size for rank in range(plan.tp))
    return ShardedCheckpoint(ranks=plan.tp, written=tuple(written), output_bytes=total)


def _is_whole(port: Port, rank: int) -> bool:
    """Whether the rank is committed and its bytes are what was committed; if not, it counts no more."""
    rank_set = port.rank_set(rank)
    try:
        if rank_set.manifest() is None:
            return False
        rank_set.verify()
    except IntegrityError:
        rank_set.withdraw()
        return False
    return True


class _DiskErrors:
    """Turn an OSError of writing into a message that names the folder and what is free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            free = os.statvfs(self.folder)
            raise EnvironmentProblem(
                f"Writing rank files to {self.folder} failed: {error.strerror or error}; "
                f"{free.f_bavail * free.f_frsize:,} bytes are free there.",
                "Free some room and run the same command; committed ranks stay.",
            ) from error


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


def header_bytes(tensors: list[RankTensor], rank: int, tp: int) -> bytes:
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


def _write_rank(
    port: Port,
    geometry: ModelGeometry,
    plan: ShardPlan,
    tensors: list[RankTensor],
    rank: int,
    progress: Progress | None,
) -> None:
    target = port.rank_file(rank)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    handles = {t.source.file: -1 for t in tensors if t.source is not None}
    digests: dict[str, str] = {}
    total, hasher = 0, blake3()
    try:
        for file in handles:
            handles[file] = os.open(file, os.O_RDONLY)
        with partial.open("wb") as out:
            for piece in _rank_pieces(geometry, plan, tensors, rank, handles):
                hasher.update(piece)
                out.write(piece)
                total += len(piece)
                if progress is not None:
                    progress(len(piece), rank)
            out.flush()
            os.fsync(out.fileno())
        if rank == 0:
            digests = _tensor_digests(tensors, handles)
    finally:
        for handle in handles.values():
            if handle >= 0:
                os.close(handle)
    expected = len(header_bytes(tensors, rank, plan.tp)) + sum(t.bytes for t in tensors)
    if total != expected:
        raise IntegrityError(f"{target}: {total} bytes were written, the plan says {expected}.")
    if target.is_dir():
        remove(target)
    partial.replace(target)
    sync_folder(target.parent)
    entry = FileEntry(name=target.name, bytes=total, blake3=hasher.hexdigest())
    facts = {"plan": plan.fingerprint(), "rank": rank, "tp": plan.tp, "tensor_digests": digests}
    CommittedSet(target.parent, f"rank-{rank:02d}").commit_entries((entry,), facts)


def _rank_pieces(
    geometry: ModelGeometry,
    plan: ShardPlan,
    tensors: list[RankTensor],
    rank: int,
    handles: dict[Path, int],
) -> Iterator[bytes]:
    yield header_bytes(tensors, rank, plan.tp)
    for tensor in tensors:
        if tensor.source is None:
            yield derived_bytes(tensor.parameter, geometry, rank)
        else:
            handle = handles[tensor.source.file]
            yield from rank_bytes(handle, tensor.source, tensor.parameter.placement, rank, plan.tp)


def _tensor_digests(tensors: list[RankTensor], handles: dict[Path, int]) -> dict[str, str]:
    """blake3 of each whole source tensor: lets a port prove itself without its checkpoint."""
    digests = {}
    for tensor in tensors:
        if tensor.source is not None:
            hasher = blake3()
            for piece in whole_bytes(handles[tensor.source.file], tensor.source):
                hasher.update(piece)
            digests[tensor.parameter.name] = hasher.hexdigest()
    return digests


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
