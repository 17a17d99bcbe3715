from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gemma_neuron.checkpoint.index import CheckpointIndex
from gemma_neuron.checkpoint.selection import INDEX_NAME, SINGLE_NAME
from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.checkpoint.values import to_float
from gemma_neuron.errors import CheckpointError, SourceChangedError
from tests.checkpoint.helpers import (
    TEXT4,
    clean,
    edit_json,
    edit_tensors,
    inspect,
    of_kind,
    only,
)
from tests.tiny import decode, encode, read_safetensors, write_sharded

SCALAR = TEXT4 + "layers.5.layer_scalar"


@pytest.fixture
def sharded(gemma4: Path) -> Path:
    write_sharded(gemma4, read_safetensors(gemma4 / SINGLE_NAME))
    (gemma4 / SINGLE_NAME).unlink()
    return gemma4


def opened_index(folder: Path) -> CheckpointIndex:
    return CheckpointIndex.open(open_source(str(folder)))


def test_sharded_checkpoint_is_whole(sharded: Path) -> None:
    clean(inspect(sharded))
    assert len(opened_index(sharded).headers) == 3


def test_values_are_the_files(gemma4: Path) -> None:
    index, tensors = opened_index(gemma4), read_safetensors(gemma4 / SINGLE_NAME)
    assert index.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = index.tensors[name]
        assert (entry.dtype, entry.shape) == tensor[:2]
        assert index.read_bytes(entry) == tensor[2]
        assert np.array_equal(index.read_values(entry), decode(tensor))
        assert index.read_bytes(entry, 1, 2) == tensor[2][1:3]


@pytest.mark.parametrize(
    ("dtype", "kind"), [("F64", "<f8"), ("F16", "<f2"), ("I32", "<i4"), ("BOOL", "?")]
)
def test_other_dtypes_read_as_floats(dtype: str, kind: str) -> None:
    data = np.array([0, 1, 1], kind)
    assert to_float(data.tobytes(), dtype).tolist() == [0.0, 1.0, 1.0]


def test_packed_dtypes_are_not_read_as_numbers() -> None:
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        to_float(b"\0", "F8_E4M3")


def test_missing_file_is_named_with_its_first_tensors(sharded: Path) -> None:
    part = sorted(sharded.glob("model-*.safetensors"))[1]
    lost = sorted(read_safetensors(part))
    part.unlink()
    report = inspect(sharded)
    found = of_kind(report, "index-missing-file")
    assert [(f.file, f.tensor, f.severity) for f in found] == [(part.name, lost[0], "error")]
    assert all(name in found[0].message for name in lost[:3])
    assert report.verdict == "broken"


def test_truncated_file_names_file_and_first_cut_tensor(sharded: Path) -> None:
    part = sorted(sharded.glob("model-*.safetensors"))[2]
    last = list(read_safetensors(part))[-1]
    part.write_bytes(part.read_bytes()[:-1])
    report = inspect(sharded)
    found = of_kind(report, "truncated-file")
    assert [(f.file, f.tensor) for f in found] == [(part.name, last)]


def test_index_names_a_tensor_its_file_lacks(sharded: Path) -> None:
    part = next(p for p in sharded.glob("model-*.safetensors") if SCALAR in read_safetensors(p))
    edit_tensors(sharded, lambda t: t.pop(SCALAR), part.name)
    report = inspect(sharded)
    found = of_kind(report, "index-missing-tensor")
    assert [(f.tensor, f.file) for f in found] == [(SCALAR, part.name)]
    assert [f.tensor for f in of_kind(report, "missing")] == [SCALAR]


def test_tensor_in_another_file_than_the_index_says(sharded: Path) -> None:
    edit_json(sharded, INDEX_NAME, lambda index: index["weight_map"].update(
        {SCALAR: "model-00001-of-00003.safetensors"}))  # fmt: skip
    found = only(inspect(sharded), "index-missing-tensor")
    assert "model-00003-of-00003.safetensors has it" in found.message


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    edit_json(sharded, INDEX_NAME, lambda index: index["weight_map"].pop(SCALAR))
    assert only(inspect(sharded), "not-in-index").tensor == SCALAR


def test_same_tensor_in_two_files(sharded: Path) -> None:
    first = "model-00001-of-00003.safetensors"
    scalar = read_safetensors(sharded / "model-00003-of-00003.safetensors")[SCALAR]
    edit_tensors(sharded, lambda t: t.update({SCALAR: scalar}), first)
    found = only(inspect(sharded), "duplicate-tensor")
    assert (found.tensor, found.file) == (SCALAR, "model-00003-of-00003.safetensors")
    assert first in found.message


def test_stray_file_beside_an_index(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "old.safetensors")
    assert only(inspect(sharded), "stray-file").file == "old.safetensors"


def test_single_file_beside_an_index_is_ambiguous(gemma4: Path) -> None:
    # transformers would read model.safetensors, most other loaders the index
    write_sharded(gemma4, read_safetensors(gemma4 / SINGLE_NAME))
    assert only(inspect(gemma4), "stray-file").file == SINGLE_NAME


def test_stray_file_beside_a_single_file(gemma4: Path) -> None:
    shutil.copy(gemma4 / SINGLE_NAME, gemma4 / "consolidated.safetensors")
    assert only(inspect(gemma4), "stray-file").file == "consolidated.safetensors"


def test_parts_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert only(inspect(sharded), "index-missing-file").file == INDEX_NAME


def test_no_weights_at_all(gemma4: Path) -> None:
    (gemma4 / SINGLE_NAME).unlink()
    report = inspect(gemma4)
    assert [f.file for f in of_kind(report, "index-missing-file")] == [SINGLE_NAME]
    assert report.verdict == "broken"


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "",
        "a\\b.safetensors", "C:model.safetensors", ".hidden.safetensors", "config.json",
        "a\0.safetensors", "a\n.safetensors", " model.safetensors", "x" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_index_with_an_unsafe_file_name(sharded: Path, name: str) -> None:
    edit_json(sharded, INDEX_NAME, lambda index: index["weight_map"].update({SCALAR: name}))
    found = of_kind(inspect(sharded), "unsafe-name")
    assert [(f.severity, f.tensor) for f in found] == [("error", SCALAR)]
    assert "\n" not in found[0].message


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'],
)
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX_NAME).write_text(content)
    found = of_kind(inspect(sharded), "bad-header")
    assert [(f.file, f.severity) for f in found] == [(INDEX_NAME, "error")]


def test_file_that_shrinks_while_it_is_read(gemma4: Path) -> None:
    index = opened_index(gemma4)
    path = gemma4 / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-2])
    entry = max(index.tensors.values(), key=lambda e: e.start)
    with pytest.raises(SourceChangedError, match=r"it had [\d,]+ bytes and has"):
        index.read_bytes(entry)


def test_digest_tells_checkpoints_of_one_geometry_apart(gemma4: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(gemma4, copy)
    assert opened_index(copy).digest == opened_index(gemma4).digest
    edit_tensors(copy, lambda t: t.update({SCALAR: encode(np.array([0.5], np.float32))}))
    assert opened_index(copy).digest != opened_index(gemma4).digest
