"""Checkpoints of other kinds, by whatever shows it: files, configs, names or dtypes of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import TEXT4, Tensors, clean, edit_json, edit_tensors, inspect, only
from tests.tiny import write_json

UP = TEXT4 + "layers.0.mlp.up_proj"
METHODS = ("bitsandbytes", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "hqq")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["whole", "text_config"])
def test_a_quantisation_config_names_its_method(gemma4: Path, method: str, part: str) -> None:
    def change(config: dict[str, Any]) -> None:
        holder = config if part == "whole" else config["text_config"]
        holder["quantization_config"] = {"quant_method": method, "bits": 4}

    edit_json(gemma4, "config.json", change)
    found = only(inspect(gemma4), "quantised")
    assert f"({method})" in found.message
    assert "bfloat16 release" in found.message


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("quantization", "config.json"),
        ("compression_config", "config.json"),
        ("", "quantize_config.json"),
        ("", "quant_config.json"),
        ("", "hf_quant_config.json"),
    ],
)
def test_other_places_that_say_quantised(gemma4: Path, key: str, file: str) -> None:
    if key:
        edit_json(gemma4, file, lambda c: c.update({key: {"bits": 4, "group_size": 64}}))
    else:
        write_json(gemma4 / file, {"bits": 4})
    assert only(inspect(gemma4), "quantised").file == file


PACKED: dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]] = {
    "GPTQ": {".qweight": ("I32", (8, 64), b"\1" * 2048), ".g_idx": ("I32", (64,), b"\0" * 256)},
    "AWQ": {".qweight": ("I32", (8, 64), b"\1" * 2048), ".qzeros": ("I32", (1, 8), b"\0" * 32)},
    "bitsandbytes": {".weight.absmax": ("F32", (8,), b"\1" * 32)},
    "compressed-tensors": {".weight_packed": ("I32", (8, 64), b"\1" * 2048)},
    "FP8": {".weight_scale_inv": ("F32", (1, 1), b"\1" * 4)},
    "MLX": {".biases": ("BF16", (128, 1), b"\1" * 256)},
}


@pytest.mark.parametrize("method", PACKED)
def test_packed_tensors_are_one_finding_without_a_config(gemma4: Path, method: str) -> None:
    def pack(tensors: Tensors) -> None:
        if ".qweight" in PACKED[method]:
            del tensors[UP + ".weight"]
        tensors.update({UP + end: tensor for end, tensor in PACKED[method].items()})

    edit_tensors(gemma4, pack)
    found = only(inspect(gemma4), "quantised")
    assert found.tensor.startswith(UP)
    assert method in found.message


def test_float8_weights_are_quantised_whatever_their_config_says(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({UP + ".weight": ("F8_E4M3", (128, 64), b"\1" * 8192)}))
    found = only(inspect(gemma4), "quantised")
    assert (found.tensor, "F8_E4M3" in found.message) == (UP + ".weight", True)


def test_a_towers_own_scales_make_no_text_quantised(gemma4: Path) -> None:
    name = "model.vision_tower.encoder.layers.0.mlp.up_proj.input_scale"
    edit_tensors(gemma4, lambda t: t.update({name: ("F32", (1,), b"\0" * 4)}))
    assert inspect(gemma4).verdict == "ok"


def test_an_adapter_that_was_saved_unmerged(gemma4: Path) -> None:
    def wrap(tensors: Tensors) -> None:
        tensors[UP + ".base_layer.weight"] = tensors.pop(UP + ".weight")
        tensors[UP + ".lora_A.default.weight"] = ("BF16", (4, 64), b"\1" * 512)

    edit_tensors(gemma4, wrap)
    assert "merge_and_unload" in only(inspect(gemma4), "adapter").message


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_auto_map_wherever_it_stands(gemma4: Path, file: str) -> None:
    edit_json(gemma4, file, lambda c: c.update(auto_map={"AutoTokenizer": ["x.Y", None]}))
    found = only(inspect(gemma4), "unsafe-format")
    assert (found.file, "trust_remote_code" in found.message) == (file, True)


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("model.pt", "pickle"),
        ("weights.ckpt", "pickle"),
        ("gemma-4-31B-Q4_K_M.gguf", "GGUF"),
        ("flax_model.msgpack", "another framework"),
        ("tf_model.h5", "another framework"),
        ("model.onnx", "another framework"),
    ],
)
def test_weights_of_another_format_say_what_to_do(gemma4: Path, file: str, word: str) -> None:
    (gemma4 / "model.safetensors").unlink()
    (gemma4 / file).write_bytes(b"\x80\x04\x95")
    found = only(inspect(gemma4), "unsafe-format")
    assert (found.file, word in found.message) == (file, True)


def test_pickles_beside_safetensors_are_harmless_and_gguf_alone_is_refused(
    gemma4: Path, tmp_path: Path
) -> None:
    (gemma4 / "training_args.bin").write_text("harmless beside safetensors")
    clean(inspect(gemma4))
    only_gguf = tmp_path / "gguf"
    only_gguf.mkdir()
    (only_gguf / "model.gguf").write_text("GGUF")
    assert only(inspect(only_gguf), "unsafe-format").file == "model.gguf"


def test_adapter_folder_without_a_config(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    found = only(inspect(tmp_path), "adapter")
    assert "merge" in found.message


def test_adapter_left_in_a_model_folder(gemma4: Path) -> None:
    # transformers would apply it on top of the model without a word
    write_json(gemma4 / "adapter_config.json", {"peft_type": "LORA"})
    assert only(inspect(gemma4), "adapter").file == "adapter_config.json"


def test_a_folder_that_is_something_else_need_not_have_a_geometry(gemma4: Path) -> None:
    """An AWQ folder of a model that is not ported: the packing is said, not the first missing key."""
    edit_json(gemma4, "config.json", lambda c: c["text_config"].pop("hidden_size"))
    edit_json(
        gemma4, "config.json", lambda c: c.update(quantization_config={"quant_method": "awq"})
    )
    only(inspect(gemma4), "quantised")
