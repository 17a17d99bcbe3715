"""Level 1: rank files that are not the checkpoint, each committed so that every digest agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from gemma_neuron.reports import LevelResult
from gemma_neuron.source_entries import FILE_HEADER, FILE_TENSORS, SOURCE_RECORD, TENSOR_DIGESTS
from gemma_neuron.validation.validator import Options, validate
from tests.tiny import write_tiny_gemma4
from tests.validation.ports import make_port


class NoRunner:
    """Level 1 asks the runner for its shape only."""

    vocab, slots, max_context, prefill_buckets, score_length = 512, 1, 96, (32,), 96


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("source"), layers=2)


@pytest.fixture
def port(source: Path, tmp_path: Path) -> Port:
    return make_port(source, tmp_path / "port", tp=4)


def judged(port: Port, checkpoint: Path | None) -> LevelResult:
    runner: Any = NoRunner()
    options = Options(checkpoint=checkpoint, levels=frozenset({1}))
    return validate(port, runner, options).levels[1]


def rewrite(port: Port, rank: int, change: Any) -> None:
    """Change one rank's tensors and commit the file again."""
    file, committed = port.rank_file(rank), port.rank_set(rank)
    facts = committed.verify().facts
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    committed.commit([file.name], facts)


def test_right_files(port: Port, source: Path) -> None:
    result = judged(port, source)
    assert result.status == "pass", result
    assert result.detail["against"] == "the checkpoint"
    assert result.detail["buffers"]["count"] == 2
    alone = judged(port, None)
    assert alone.status == "pass"
    assert alone.detail["against"] == "the digests recorded at sharding"


def zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.down_proj.weight"].zero_()


def lose_buffer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.layer_scalar"].fill_(1.0)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("layers.0.layer_scalar")


def turn_heads(tensors: dict[str, torch.Tensor]) -> None:
    name = "layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].roll(8, 0).contiguous()


def wrong_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors["rank"].fill_(0)


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (zero, "layers.1.mlp.down_proj.weight"),
        (lose_buffer, "layers.0.layer_scalar: rank"),
        (drop, "layer_scalar is missing"),
        (turn_heads, "another copy"),
        (wrong_rank, "ranks say"),
    ],
)
def test_fault_in_one_rank(
    port: Port, source: Path, change: Any, words: str, with_checkpoint: bool
) -> None:
    rewrite(port, 2, change)
    result = judged(port, source if with_checkpoint else None)
    assert result.status == "fail" and words in result.reason


def test_swapped_ranks(port: Port, source: Path) -> None:
    first, second = load_file(port.rank_file(0)), load_file(port.rank_file(1))
    rewrite(port, 0, lambda tensors: tensors.update(second))
    rewrite(port, 1, lambda tensors: tensors.update(first))
    assert judged(port, source).status == "fail"


def test_wrong_rope_in_every_rank(port: Port, source: Path) -> None:
    def full_width(tensors: dict[str, torch.Tensor]) -> None:
        name = "rope.global.inv_freq"
        pairs = tensors[name].numel()
        tensors[name] = (1e6 ** -(torch.arange(pairs) / pairs)).float()

    for rank in range(4):
        rewrite(port, rank, full_width)
    result = judged(port, source)
    assert result.status == "fail" and "proportional form" in result.reason


def test_lost_buffer_in_every_rank(port: Port, source: Path) -> None:
    for rank in range(4):
        rewrite(port, rank, lose_buffer)
    reason = judged(port, source).reason
    assert "layer_scalar: rank 0 holds another byte 0 of the whole tensor" in reason


def test_damaged_file(port: Port, source: Path) -> None:
    data = bytearray(port.rank_file(3).read_bytes())
    data[-1] ^= 255
    port.rank_file(3).write_bytes(data)
    result = judged(port, source)
    assert result.status == "fail" and "another digest" in result.reason


def test_nothing_to_compare_with(port: Port) -> None:
    (port.path / SOURCE_RECORD).unlink()
    assert judged(port, None).status == "not-run"


def test_without_the_checkpoint_its_files_are_made_up_again(port: Port, source: Path) -> None:
    """As `shard` records a file all of whose tensors are used: by its own digest alone."""
    record = port.read_json(SOURCE_RECORD)
    assert record is not None
    with TensorFile(source / "model.safetensors") as file:
        names = sorted(file.tensors, key=lambda name: file.tensors[name].start)
        header = file.path.read_bytes()[8 : file.tensors[names[0]].start].decode()
    (entry,) = record["files"]
    entry.pop(TENSOR_DIGESTS)
    own = [name.removeprefix("model.language_model.") for name in names]
    entry |= {FILE_HEADER: header, FILE_TENSORS: own}
    write_json_atomic(port.path / SOURCE_RECORD, record)
    result = judged(port, None)
    assert result.status == "pass" and result.detail["tensors_compared"] == len(own)
    for rank in range(4):
        rewrite(port, rank, lose_buffer)
    assert "model.safetensors: the ranks' tensors are not" in judged(port, None).reason
