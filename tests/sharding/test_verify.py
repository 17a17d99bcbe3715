"""`shard --verify`: one wrong byte anywhere in any rank is found and named, on a finished port too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from tests.cli_process import Ended, run_main
from tests.sharding.shards import cut_port, write_family


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("source"), "26B-A4B")


def flip(port: Port, rank: int, tensor: str, byte: int) -> None:
    """Another byte in one rank's part, committed as if it were right."""
    path = port.rank_file(rank)
    with TensorFile(path) as file:
        place = file.tensors[tensor].start + byte
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    facts = port.rank_set(rank).manifest()
    assert facts is not None
    port.rank_set(rank).commit([path.name], facts.facts)


def verified(capsys: pytest.CaptureFixture[str], source: Path, port: Port) -> Ended:
    return run_main(capsys, "shard", source, "--out", port.path, "--tp", "4", "--verify", "--json")


@pytest.mark.parametrize(
    ("rank", "tensor", "byte", "whole_byte"),
    [
        (3, "layers.0.mlp.up_proj.weight", 5, 3 * 128 // 4 * 64 * 2 + 5),  # rows
        (2, "layers.1.mlp.down_proj.weight", 64, 128 * 2 + 2 * 64),  # columns: row 1, part 2
        (1, "norm.weight", 7, 7),  # whole on every rank
        (2, "layers.0.experts.gate_up_proj", 4 * 128 + 3, 16 * 128 + 2 * 4 * 128 + 3),  # up's half
        (1, "layers.0.experts.down_proj", 8, 32 + 8),  # row 1
    ],
)
def test_a_wrong_byte_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: Path,
    rank: int,
    tensor: str,
    byte: int,
    whole_byte: int,
) -> None:
    port = cut_port(source, tmp_path / "port", 4)
    flip(port, rank, tensor, byte)
    done = verified(capsys, source, port)
    assert done.code == 5
    message = json.loads(done.out)["error"]["message"]
    assert f"{tensor}: rank {rank} holds another byte {whole_byte:,} of the whole" in message


def test_a_finished_port_is_verified_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
) -> None:
    port = cut_port(source, tmp_path / "port", 4)
    done = verified(capsys, source, port)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["verified_tensors"] == len(port.plan.parameters)
    assert answer["units"] == {"total": 4, "built": 0, "reused": 4}
