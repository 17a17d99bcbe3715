"""What `plan` says a rank takes is what `shard` writes, tensor by tensor, and the ranks make up the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.models.rotary import inverse_frequencies
from gemma_neuron.pipeline import examined
from gemma_neuron.plan import PlannedParameter
from gemma_neuron.port import Port
from gemma_neuron.sharding.memory import weight_bytes
from gemma_neuron.sharding.rank_layout import header_bytes, rank_tensors
from tests.sharding.shards import FAMILIES, cut_port, write_family
from tests.tiny import Tensor, read_safetensors

REAL = os.environ.get("GEMMA_NEURON_TEST_270M", "")
REAL_MARKS = (
    pytest.mark.weights,
    pytest.mark.skipif(not REAL, reason="GEMMA_NEURON_TEST_270M names no folder"),
)


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param("270M", marks=REAL_MARKS)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "270M":
        return Path(REAL)
    return write_family(tmp_path_factory.mktemp("source"), request.param)


def ported(source: Path, folder: Path, tp: int, **more: Any) -> Port:
    """The source cut; 270M is a base model, without a template."""
    base = not (source / "chat_template.jinja").is_file()
    return cut_port(source, folder / "port", tp, base=base, **more)


def reassembled(parts: list[bytes], p: PlannedParameter, item: int) -> bytes:
    """A whole tensor's bytes from the ranks' parts, by the placement's definition alone."""
    kind, tp = p.placement.kind, len(parts)
    if kind == "whole":
        assert all(part == parts[0] for part in parts)
        return parts[0]
    if kind == "rows":
        return b"".join(parts)
    if kind == "repeated-rows":
        each = tp // p.placement.parts
        assert all(parts[rank] == parts[rank // each * each] for rank in range(tp))
        return b"".join(parts[::each])
    local = (*p.local_shape[:-1], p.local_shape[-1] * item)
    grids = [np.frombuffer(part, np.uint8).reshape(local) for part in parts]
    if kind in ("columns", "expert-down"):
        return np.concatenate(grids, axis=-1).tobytes()
    assert kind == "expert-gate-up"
    halves = [np.split(grid, 2, axis=1) for grid in grids]
    return np.concatenate([h[i] for i in (0, 1) for h in halves], axis=1).tobytes()


@pytest.mark.parametrize("strategy", ["replicate-kv", "replicate-global"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_are_as_predicted_and_make_up_the_checkpoint(
    tmp_path: Path, source: Path, tp: int, strategy: str
) -> None:
    port = ported(source, tmp_path, tp, strategy=strategy, verify=True)
    whole = read_safetensors(source / "model.safetensors")
    ranks = [read_safetensors(port.rank_file(rank)) for rank in range(tp)]
    predicted = rank_tensors(port.plan, examined(open_source(str(source))).tensors())
    sizes = {tensor.parameter.name: tensor.bytes for tensor in predicted}
    for number, rank in enumerate(ranks):
        assert {name: len(data) for name, (_, _, data) in rank.items()} == sizes
        total = weight_bytes(port.plan, "bfloat16")
        header = len(header_bytes(predicted, number, tp))
        assert port.rank_file(number).stat().st_size == header + total
    for p in port.plan.parameters:
        held = [rank[p.name] for rank in ranks]
        assert {shape for _, shape, _ in held} == {p.local_shape}
        if not p.derived:
            name = next(n for n in whole if f".{n}".endswith(f".{p.name}"))
            dtype, shape, data = whole[name]
            assert shape == p.shape and {found for found, _, _ in held} == {dtype}
            assert reassembled([data for _, _, data in held], p, 2) == data, p.name
    derived_tensors_are_right(port.geometry, port.plan.parameters, ranks)


def derived_tensors_are_right(
    geometry: object, parameters: tuple[PlannedParameter, ...], ranks: list[dict[str, Tensor]]
) -> None:
    """Each rank has its own number, and all have each layer kind's frequencies."""
    derived = {p.name: p for p in parameters if p.derived}
    assert "rank" in derived and len(derived) > 1
    for number, rank in enumerate(ranks):
        assert rank["rank"] == ("I32", (1,), number.to_bytes(4, "little"))
        for name in derived.keys() - {"rank"}:
            dtype, _, data = rank[name]
            assert dtype == "F32" and data == ranks[0][name][2]
            assert 0 < np.frombuffer(data, "<f4").max() <= 1


def test_torch_reads_a_rank_file(tmp_path: Path, source: Path) -> None:
    port = ported(source, tmp_path, 2)
    with safe_open(port.rank_file(1), framework="pt") as file:
        assert file.get_tensor("rank").tolist() == [1]
        assert set(file.keys()) == {p.name for p in port.plan.parameters}
        for kind, rope in port.geometry.rope.items():
            layer = port.geometry.layer_of_kind(kind)
            assert layer is not None
            wanted = inverse_frequencies(rope, layer.head_dim)
            assert file.get_tensor(f"rope.{kind}.inv_freq").equal(wanted)
