from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.helpers import TEXT4, Tensors, clean, edit_tensors, inspect, of_kind, only
from tests.tiny import decode, encode, read_safetensors

SCALAR = TEXT4 + "layers.3.layer_scalar"
WEIGHT = TEXT4 + "layers.3.mlp.up_proj.weight"


def scalars(value: float, count: int = 6) -> Tensors:
    return {
        f"{TEXT4}layers.{i}.layer_scalar": encode(np.array([value], np.float32))
        for i in range(count)
    }


def test_buffers_are_listed_with_their_range(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({SCALAR: encode(np.array([0.375], np.float32))}))
    buffers = {b.tensor: b for b in inspect(gemma4).buffers}
    assert len(buffers) == 6
    found = buffers[SCALAR]
    assert (found.shape, found.dtype, found.min, found.max) == ((1,), "BF16", 0.375, 0.375)


def test_all_scalars_one_is_a_warning_that_shows_them(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update(scalars(1.0)))
    found = only(inspect(gemma4), "all-one", "warning")
    assert "1.0, 1.0, 1.0, 1.0, 1.0, 1.0" in found.message
    assert "lost buffer" in found.message
    assert "freshly initialised" in found.message
    assert found.tensor.endswith("layer_scalar")


def test_some_scalars_one_is_no_finding(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update(scalars(1.0, count=5)))
    clean(inspect(gemma4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_buffer_that_is_not_finite(gemma4: Path, value: float) -> None:
    edit_tensors(gemma4, lambda t: t.update({SCALAR: encode(np.array([value], np.float32), "F32")}))
    report = inspect(gemma4)
    found = of_kind(report, "non-finite")
    assert [(f.tensor, f.severity) for f in found] == [(SCALAR, "error")]
    assert report.verdict == "broken"


def test_buffer_of_zero_is_an_error(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update(scalars(0.0, count=1)))
    assert only(inspect(gemma4), "all-zero").tensor == TEXT4 + "layers.0.layer_scalar"
    only(inspect(gemma4, values=True), "all-zero")  # said once


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_values_finds_one_bad_value(gemma4: Path, value: float, dtype: str) -> None:
    def spoil(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            values = decode(tensor)
            if name == WEIGHT:
                values[7, 5] = value
            tensors[name] = encode(values, dtype)

    edit_tensors(gemma4, spoil)
    clean(inspect(gemma4))
    found = only(inspect(gemma4, values=True), "non-finite")
    assert (found.tensor, "holds 1 values" in found.message) == (WEIGHT, True)


def test_values_finds_a_tensor_of_zeros(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({WEIGHT: encode(np.zeros((128, 64), np.float32))}))
    clean(inspect(gemma4))
    assert only(inspect(gemma4, values=True), "all-zero", "warning").tensor == WEIGHT


def test_values_finds_a_long_stretch_of_zeros(
    gemma4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemma_neuron.checkpoint.values.PIECE_BYTES", 1024)

    def hole(tensors: Tensors) -> None:
        dtype, shape, data = tensors[WEIGHT]
        tensors[WEIGHT] = (dtype, shape, data[:2048] + b"\0" * 1024 + data[3072:])

    edit_tensors(gemma4, hole)
    found = only(inspect(gemma4, values=True), "all-zero", "warning")
    assert "byte 2,048" in found.message


def test_values_of_a_sound_checkpoint(gemma4: Path, gemma3: Path, e2b: Path) -> None:
    for folder in (gemma4, gemma3, e2b):
        clean(inspect(folder, values=True))


NORM = TEXT4 + "layers.{}.input_layernorm.weight"


def test_values_finds_norms_that_were_never_trained(gemma4: Path) -> None:
    ones = encode(np.ones((64,), np.float32))
    edit_tensors(gemma4, lambda t: t.update({NORM.format(i): ones for i in range(4)}))
    clean(inspect(gemma4))
    found = only(inspect(gemma4, values=True), "all-one", "warning")
    assert found.tensor == NORM.format(0)
    assert "4 " + NORM.format("*") in found.message
    edit_tensors(gemma4, lambda t: t.update({NORM.format(i): t[NORM.format(5)] for i in range(3)}))
    assert NORM.format(3) in only(inspect(gemma4, values=True), "all-one", "warning").message


def test_values_tells_how_far_it_is(gemma4: Path) -> None:
    told: list[tuple[int, str]] = []
    inspect(gemma4, values=True, progress=lambda count, name: told.append((count, name)))
    tensors = read_safetensors(gemma4 / "model.safetensors")
    assert sorted(name for _, name in told) == sorted(tensors)
    assert sum(count for count, _ in told) == sum(len(data) for _, _, data in tensors.values())
