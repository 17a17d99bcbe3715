"""Rank files: buffers in every rank, damage found before use, the record of what they were cut from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.errors import IntegrityError, PortMismatchError
from gemma_neuron.reassembly import TensorFile, recorded_digests, recorded_files, wholes
from tests.sharding.shards import cut_port
from tests.tiny import read_safetensors, write_safetensors, write_tiny_gemma4


def test_orig_02_layer_scalar_is_in_every_rank_file(tmp_path: Path) -> None:
    """orig-02-layer-scalar-buffer: the checkpoint's value, on every rank, for every layer."""
    source = write_tiny_gemma4(tmp_path / "source")
    port = cut_port(source, tmp_path / "port", 4)
    whole = read_safetensors(source / "model.safetensors")
    for rank in range(4):
        held = read_safetensors(port.rank_file(rank))
        names = [name for name in held if name.endswith("layer_scalar")]
        assert len(names) == len(port.geometry.layers)
        assert all(held[n][2] == whole["model.language_model." + n][2] for n in names)


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


def test_a_flipped_bit_is_found_before_use(tmp_path: Path) -> None:
    port = cut_port(write_tiny_gemma4(tmp_path / "source"), tmp_path / "port", 2)
    data = bytearray(port.rank_file(1).read_bytes())
    data[-5] ^= 1
    port.rank_file(1).write_bytes(data)
    with pytest.raises(IntegrityError, match="rank-01"):
        port.rank_set(1).verify()


def test_a_changed_source_is_another_port(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    cut_port(source, tmp_path / "port", 2)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PortMismatchError):
        cut_port(source, tmp_path / "port", 2)


def test_source_record_names_every_large_file(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    port = cut_port(source, tmp_path / "port", 1)
    (entry,) = json.loads((port.path / "source.json").read_text())["files"]
    assert entry["name"] == "model.safetensors"
    assert entry["bytes"] == (source / "model.safetensors").stat().st_size


def test_a_port_knows_its_source_without_it(tmp_path: Path) -> None:
    """A file that is used whole is made up again from the ranks; of one with tensors left out, each tensor is known."""
    source = write_tiny_gemma4(tmp_path / "source")
    port = cut_port(source, tmp_path / "port", 2)
    (file,) = recorded_files(port)
    assert not recorded_digests(port)
    ranks = [TensorFile(port.rank_file(rank)) for rank in range(2)]
    parts = [next(wholes(port.plan.parameter(name), ranks, 2)) for name in file.names]
    assert file.is_made_up_by(parts)
    assert not file.is_made_up_by([*parts[1:], parts[0]])
    tensors = read_safetensors(source / "model.safetensors")
    tensors["model.vision_tower.weight"] = ("BF16", (2,), b"more")
    write_safetensors(source / "model.safetensors", tensors)
    other = cut_port(source, tmp_path / "other", 2)
    assert not recorded_files(other)
    digests = recorded_digests(other)
    assert digests.keys() == {p.name for p in other.plan.parameters if not p.derived}
    for name, digest in digests.items():
        assert digest == digest_bytes(tensors["model.language_model." + name][2])
    for rank in ranks:
        rank.close()
