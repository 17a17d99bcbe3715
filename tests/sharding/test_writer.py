"""Rank files: predicted bytes, bit-exact reassembly, buffers in every rank, resume after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from gemma_neuron.errors import IntegrityError, PortMismatchError
from gemma_neuron.pipeline import CompileRequest, shard
from gemma_neuron.plan import PlannedParameter
from gemma_neuron.port import Port
from gemma_neuron.sharding.writer import header_bytes, rank_tensors
from tests.tiny import read_safetensors, write_tiny_gemma3, write_tiny_gemma4


def sharded(source: Path, out: Path, tp: int, strategy: str = "auto") -> Port:
    request = CompileRequest(out=out, backend="", tp=tp, strategy=strategy)  # type: ignore[arg-type]
    shard(str(source), request, None)
    return Port(out)


def reassembled(parts: list[bytes], p: PlannedParameter, item: int) -> bytes:
    """A whole tensor's bytes from the ranks' parts, by the placement's definition alone."""
    kind, tp = p.placement.kind, len(parts)
    if kind == "whole":
        return parts[0]
    if kind == "rows":
        return b"".join(parts)
    if kind == "repeated-rows":
        return b"".join(parts[:: tp // p.placement.parts])
    local = (*p.local_shape[:-1], p.local_shape[-1] * item)
    grids = [np.frombuffer(part, np.uint8).reshape(local) for part in parts]
    if kind in ("columns", "expert-down"):
        return np.concatenate(grids, axis=-1).tobytes()
    assert kind == "expert-gate-up"
    halves = [np.split(grid, 2, axis=1) for grid in grids]
    return np.concatenate([h[i] for i in (0, 1) for h in halves], axis=1).tobytes()


MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("strategy", ["replicate-kv", "replicate-global"])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("family", ["gemma4", "gemma3", "moe"])
def test_ranks_reassemble_to_the_checkpoint(
    tmp_path: Path, family: str, tp: int, strategy: str
) -> None:
    write = write_tiny_gemma3 if family == "gemma3" else write_tiny_gemma4
    extra = MOE if family == "moe" else {}
    source = write(tmp_path / "source", num_attention_heads=8, **extra)
    port = sharded(source, tmp_path / "port", tp, strategy)
    whole = read_safetensors(source / "model.safetensors")
    ranks = [read_safetensors(port.rank_file(r)) for r in range(tp)]
    for p in port.plan.parameters:
        if p.derived:
            continue
        name = next(n for n in whole if n.endswith(p.name))
        dtype, shape, data = whole[name]
        assert shape == p.shape
        for rank in ranks:
            assert (rank[p.name][0], rank[p.name][1]) == (dtype, p.local_shape)
        assert reassembled([r[p.name][2] for r in ranks], p, 2) == data, p.name


def test_orig_02_layer_scalar_is_in_every_rank_file(tmp_path: Path) -> None:
    """orig-02-layer-scalar-buffer: the checkpoint's value, on every rank, for every layer."""
    source = write_tiny_gemma4(tmp_path / "source")
    port = sharded(source, tmp_path / "port", 4)
    whole = read_safetensors(source / "model.safetensors")
    for rank in range(4):
        held = read_safetensors(port.rank_file(rank))
        names = [name for name in held if name.endswith("layer_scalar")]
        assert len(names) == len(port.geometry.layers)
        assert all(held[n][2] == whole["model.language_model." + n][2] for n in names)


def test_predicted_bytes_are_written_and_torch_reads_them(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    port = sharded(source, tmp_path / "port", 2)
    from gemma_neuron.checkpoint.source import open_source
    from gemma_neuron.pipeline import examined

    tensors = rank_tensors(port.plan, examined(open_source(str(source))).tensors())
    predicted = len(header_bytes(tensors, 0, 2)) + sum(t.bytes for t in tensors)
    assert port.rank_file(0).stat().st_size == predicted
    with safe_open(port.rank_file(1), framework="pt") as file:
        assert file.get_tensor("rank").tolist() == [1]
        assert set(file.keys()) == {p.name for p in port.plan.parameters}


def test_nxdi_01_rotary_frequencies(tmp_path: Path) -> None:
    """nxdi-01-proportional-rope: a 512-wide head has 64 real frequencies over 512, then zeros."""
    from gemma_neuron.geometry import RopeGeometry
    from gemma_neuron.models.rotary import inverse_frequencies

    rope = RopeGeometry(kind="proportional", theta=1e6, rotated_fraction=0.25)
    found = inverse_frequencies(rope, 512)
    assert found.shape == (256,)
    assert found[0] == 1.0
    assert float(found[1]) == pytest.approx(1e6 ** (-2 / 512))
    assert not found[64:].any() and found[:64].all()


def test_a_killed_run_goes_on_and_writes_no_committed_rank_twice(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source", intermediate_size=4096)
    want = sharded(source, tmp_path / "undisturbed", 8)
    out = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "gemma_neuron",
        "shard",
        str(source),
        "--out",
        str(out),
        "--tp",
        "8",
    ]
    kept: dict[str, int] = {}
    for delay in (0.3, 0.4, 0.5, 0.6):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        for marker in sorted(out.glob("weights/*.committed")):
            inode = marker.with_suffix(".safetensors").stat().st_ino
            assert kept.setdefault(marker.name, inode) == inode
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    for rank in range(8):
        assert want.rank_file(rank).read_bytes() == Port(out).rank_file(rank).read_bytes()
    assert not list(out.rglob("*.partial"))


def test_a_flipped_bit_is_found_before_use(tmp_path: Path) -> None:
    port = sharded(write_tiny_gemma4(tmp_path / "source"), tmp_path / "port", 2)
    data = bytearray(port.rank_file(1).read_bytes())
    data[-5] ^= 1
    port.rank_file(1).write_bytes(data)
    with pytest.raises(IntegrityError, match="rank-01"):
        port.rank_set(1).verify()


def test_a_changed_source_is_another_port(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    sharded(source, tmp_path / "port", 2)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PortMismatchError):
        sharded(source, tmp_path / "port", 2)


def test_source_record_names_every_large_file(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    port = sharded(source, tmp_path / "port", 1)
    (entry,) = json.loads((port.path / "source.json").read_text())["files"]
    assert entry["name"] == "model.safetensors"
    assert entry["bytes"] == (source / "model.safetensors").stat().st_size
