"""A port folder made by hand: what sharding and compiling would leave, on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gemma_neuron.artifacts import digest_bytes, digest_file, write_json_atomic
from gemma_neuron.backends.base import CompileSpec, Dtype
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.parameters import Cut
from gemma_neuron.plan import LayerPlan, Placement, PlannedParameter, ShardPlan
from gemma_neuron.port import Fingerprints, Port, PortRecord, SourceRecord
from gemma_neuron.source_entries import SOURCE_RECORD, TENSOR_DIGESTS

ROWS = {Cut.QUERY_ROWS, Cut.WIDTH_ROWS, Cut.VOCAB_ROWS}
COLUMNS = {Cut.QUERY_COLUMNS, Cut.WIDTH_COLUMNS}


def make_port(
    source: Path,
    path: Path,
    *,
    tp: int = 2,
    dtype: Dtype = "float32",
    slots: int = 2,
    max_context: int = 256,
    buckets: tuple[int, ...] = (32, 64),
) -> Port:
    """A port of `source` with rank files, committed; KV rows are repeated over pairs of ranks."""
    (path / "source").mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path / "source" / file.name)
    port = Port(path)
    template = load_chat_assets(source).template
    plan = _plan(source, tp)
    write_json_atomic(path / "plan.json", plan.to_json())
    port.write_record(
        PortRecord(
            source=SourceRecord(kind="folder", uri=source.name),
            fingerprints=Fingerprints(
                config="c",
                checkpoint="checkpoint",
                template=template.sha256 if template else "",
                prompt="prompt",
                plan=plan.fingerprint(),
            ),
            versions={},
            compile=CompileSpec(
                backend="cpu", dtype=dtype, slots=slots, max_context=max_context, buckets=buckets
            ),
        )
    )
    tensors = checkpoint_tensors(source, plan)
    write_ranks(port, tensors)
    _write_source_record(port, source, tensors)
    return port


def _write_source_record(port: Port, source: Path, tensors: dict[str, Any]) -> None:
    (file,) = source.glob("*.safetensors")
    entry = {"name": file.name, "bytes": file.stat().st_size, "blake3": digest_file(file)}
    planned = [p.name for p in port.plan.parameters if not p.derived]
    digests = {name: digest_bytes(_raw(tensors[name])) for name in planned}
    write_json_atomic(port.path / SOURCE_RECORD, {"files": [{**entry, TENSOR_DIGESTS: digests}]})


def checkpoint_tensors(source: Path, plan: ShardPlan) -> dict[str, Any]:
    """Our name → whole tensor, derived ones included."""
    geometry = read_geometry(json.loads((source / "config.json").read_text()))
    table = read_parameter_table(geometry)
    out: dict[str, Any] = {}
    with safe_open(str(source / "model.safetensors"), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            out[table.local_name(name) or name] = file.get_tensor(name)
    for kind, rope in geometry.rope.items():
        name = f"rope.{kind}.inv_freq"
        planned = next((p for p in plan.parameters if p.name == name), None)
        if planned is None:
            continue
        pairs = planned.shape[0]
        freq = rope.theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs) / rope.factor
        if rope.kind == "proportional":
            freq[round(rope.rotated_fraction * pairs) :] = 0
        out[name] = freq.float()
    return out


def write_ranks(port: Port, tensors: dict[str, Any]) -> None:
    """Cut and commit every rank file."""
    port.weights_folder.mkdir(exist_ok=True)
    plan = port.plan
    for rank in range(plan.tp):
        mine = {p.name: _part(tensors, p, rank, plan.tp) for p in plan.parameters}
        file = port.rank_file(rank)
        save_file(mine, file)
        port.rank_set(rank).commit([file.name])


def _raw(tensor: Any) -> bytes:
    raw: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _part(tensors: dict[str, Any], p: PlannedParameter, rank: int, tp: int) -> Any:
    if p.placement.kind == "rank":
        return torch.tensor([rank], dtype=torch.int32)
    if p.placement.kind == "whole":
        return tensors[p.name].contiguous()
    axis = 1 if p.placement.kind == "columns" else 0
    part = p.placement.part_of_rank(rank, tp)
    return tensors[p.name].chunk(p.placement.parts, axis)[part].contiguous()


def _plan(source: Path, tp: int) -> ShardPlan:
    geometry = read_geometry(json.loads((source / "config.json").read_text()))
    parameters = []
    for spec in read_parameter_table(geometry):
        if spec.cut in ROWS:
            placement = Placement(kind="rows", parts=tp)
        elif spec.cut in COLUMNS:
            placement = Placement(kind="columns", parts=tp)
        elif spec.cut is Cut.KV_ROWS and tp > 1:
            placement = Placement(kind="repeated-rows", parts=tp // 2)
        elif spec.cut is Cut.RANK:
            placement = Placement(kind="rank", parts=tp)
        else:
            placement = Placement(kind="whole", parts=1)
        parameters.append(
            PlannedParameter(
                name=spec.name,
                shape=spec.shape,
                local_shape=placement.local_shape(spec.shape),
                placement=placement,
                layer=spec.layer,
                derived=spec.origin == "derived",
                dtype=spec.dtype,
                buffer=spec.buffer,
            )
        )
    layers = tuple(
        LayerPlan(
            index=layer.index,
            kind=layer.kind,
            placement="replicate-kv",
            query_heads_per_rank=layer.query_heads // tp,
            kv_heads_per_rank=1,
            head_dim=layer.head_dim,
        )
        for layer in geometry.layers
    )
    return ShardPlan(tp=tp, strategy="replicate-kv", layers=layers, parameters=tuple(parameters))
