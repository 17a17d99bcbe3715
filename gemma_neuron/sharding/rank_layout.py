"""What a rank file looks like before a tensor is read: its tensors in order, its header, its size, its facts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemma_neuron.plan import PlannedParameter, ShardPlan
from gemma_neuron.sharding.cuts import ITEM_BYTES, TensorSource

DERIVED_DTYPES = {"float32": "F32", "int32": "I32"}


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One tensor of a rank file: its header entry and where its bytes come from."""

    parameter: PlannedParameter
    dtype: str
    bytes: int
    source: TensorSource | None


def rank_tensors(plan: ShardPlan, sources: Mapping[str, TensorSource]) -> list[RankTensor]:
    """The tensors of every rank file, in file order: shapes and dtypes are the same on all ranks.

    Derived ones come late: their values need torch, and its import takes a second, in which the others are read. Only
    those of an odd number of 16-bit values come after them, so that a 32-bit value lies at a multiple of 4.
    """
    found = []
    for parameter in plan.parameters:
        source = None if parameter.derived else sources[parameter.name]
        dtype = DERIVED_DTYPES[str(parameter.dtype)] if source is None else source.dtype
        size = ITEM_BYTES[dtype]
        for length in parameter.local_shape:
            size *= length
        found.append(RankTensor(parameter, dtype, size, source))
    return sorted(found, key=lambda tensor: (tensor.bytes % 4 != 0, tensor.source is None))


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


def file_bytes(tensors: Sequence[RankTensor], rank: int, tp: int) -> int:
    return len(header_bytes(tensors, rank, tp)) + sum(tensor.bytes for tensor in tensors)


def rank_facts(plan: ShardPlan, rank: int) -> dict[str, object]:
    """What a rank's manifest says besides its file: which part of which plan it is."""
    return {"plan": plan.fingerprint(), "rank": rank, "tp": plan.tp}
