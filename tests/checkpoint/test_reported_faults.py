"""Faults reported in public against other stacks, by our list's id: each is caught or comes out right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gemma_neuron.checkpoint.audit import examine
from gemma_neuron.checkpoint.source import open_source, read_small_files
from tests.checkpoint.helpers import (
    TEXT4,
    Tensors,
    clean,
    edit_json,
    edit_tensors,
    inspect,
    of_kind,
    only,
)
from tests.tiny import decode, encode, read_safetensors, write_sharded, write_tiny_gemma4

TABLE4 = TEXT4 + "embed_tokens.weight"


def test_orig_02_layer_scalar_lost_by_a_loader_of_parameters(gemma4: Path) -> None:
    def parameters_only(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("layer_scalar")]:
            del tensors[name]

    edit_tensors(gemma4, parameters_only)
    report = inspect(gemma4)
    lost = [f.tensor for f in of_kind(report, "missing")]
    assert lost == [f"{TEXT4}layers.{i}.layer_scalar" for i in range(6)]
    assert report.verdict == "broken"


def test_orig_03_template_left_behind(gemma4: Path) -> None:
    sha256 = inspect(gemma4).chat_template["sha256"]
    assert len(sha256) == 64
    (gemma4 / "chat_template.jinja").unlink()
    only(inspect(gemma4), "template-missing", "error")


def test_orig_03_template_travels_with_the_port(gemma4: Path) -> None:
    assert "chat_template.jinja" in read_small_files(open_source(str(gemma4)))


def test_orig_13_tokenizer_not_shipped(gemma4: Path) -> None:
    (gemma4 / "tokenizer.json").unlink()
    assert "<unk>" in only(inspect(gemma4), "tokenizer-missing").message


def test_nxdi_06_v_proj_of_a_layer_whose_v_is_its_k(gemma4: Path) -> None:
    clean(inspect(gemma4))  # layer 5 is global: no v_proj is right
    base = TEXT4 + "layers.5.self_attn."
    edit_tensors(gemma4, lambda t: t.update({base + "v_proj.weight": t[base + "k_proj.weight"]}))
    found = only(inspect(gemma4), "unexpected")
    assert "attention_k_eq_v" in found.message


def test_load_01_fixtures_do_not_hide_layer_scalar(gemma4: Path) -> None:
    values = [buffer.min for buffer in inspect(gemma4).buffers]
    assert len(values) == 6
    assert all(0 < value < 1 for value in values)


def test_load_03_prefix_of_the_text_model(gemma4: Path) -> None:
    table = examine(open_source(str(gemma4))).table
    assert table is not None
    local = table.local_name(TEXT4 + "layers.5.self_attn.k_proj.weight")
    assert local == "layers.5.self_attn.k_proj.weight"
    for tower in ("model.vision_tower.encoder", "model.audio_tower"):
        name = f"{tower}.layers.5.self_attn.k_proj.weight"
        assert table.skip_rule(name) is not None
        assert table.local_name(name) not in table.by_name()


@pytest.mark.parametrize("kept", [True, False])
def test_load_06_unused_kv_of_sharing_layers(e2b: Path, kept: bool) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(5, 10):
            for part in ("k_proj", "v_proj", "k_norm"):
                own = tensors[f"{TEXT4}layers.{layer - 5}.self_attn.{part}.weight"]
                tensors[f"{TEXT4}layers.{layer}.self_attn.{part}.weight"] = own

    if kept:
        edit_tensors(e2b, add)
    report = inspect(e2b)
    clean(report)
    assert report.skipped_by_rule.get("borrowed-kv", 0) == (15 if kept else 0)


def test_load_09_census_of_per_layer_embeddings(e2b: Path) -> None:
    report = inspect(e2b)
    counts = report.tensors
    assert counts.used + counts.skipped + counts.tied == len(
        read_safetensors(e2b / "model.safetensors")
    )
    edit_tensors(e2b, lambda t: t.pop(TEXT4 + "embed_tokens_per_layer.weight"))
    assert only(inspect(e2b), "missing").tensor == TEXT4 + "embed_tokens_per_layer.weight"


def test_load_10_missing_shard(gemma4: Path) -> None:
    parts = write_sharded(gemma4, read_safetensors(gemma4 / "model.safetensors"))
    (gemma4 / "model.safetensors").unlink()
    first = sorted(read_safetensors(gemma4 / parts[0]))[0]
    (gemma4 / parts[0]).unlink()
    [found] = of_kind(inspect(gemma4), "index-missing-file")
    assert found.file == parts[0]
    assert first in found.message


def test_load_11_truncated_file(gemma4: Path) -> None:
    path = gemma4 / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = inspect(gemma4)
    [found] = of_kind(report, "truncated-file")
    assert found.file == "model.safetensors"
    assert report.verdict == "broken"


def test_load_16_head_with_the_embedding_scale_folded_in(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({"lm_head.weight": encode(decode(t[TABLE4]) * 8.0)}))
    only(inspect(gemma4), "tied-differs")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_load_17_head_in_every_form(tmp_path: Path, tied: bool, head: str) -> None:
    folder = write_tiny_gemma4(tmp_path / "m", layers=2, tie_word_embeddings=tied)

    def change(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)
        if head != "absent":
            factor = 1.0 if head == "equal" else -1.0
            tensors["lm_head.weight"] = encode(decode(tensors[TABLE4]) * factor)

    edit_tensors(folder, change)
    report = inspect(folder)
    if tied and head == "different":
        assert only(report, "tied-differs").tensor == "lm_head.weight"
    elif not tied and head == "absent":
        assert only(report, "missing").tensor == "lm_head.weight"
    else:
        clean(report)
        assert report.tensors.tied == (tied and head == "equal")


def test_load_19_quantised_checkpoint(gemma4: Path) -> None:
    edit_json(
        gemma4, "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})
    )
    assert "bfloat16 release" in only(inspect(gemma4), "quantised").message


def test_load_22_trained_head_under_a_tied_config(gemma4: Path) -> None:
    def one_row(tensors: Tensors) -> None:
        values = decode(tensors[TABLE4])
        values[106] += 0.5
        tensors["lm_head.weight"] = encode(values)

    edit_tensors(gemma4, one_row)
    only(inspect(gemma4), "tied-differs")


def test_load_23_untied_head_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny_gemma4(tmp_path / "m", layers=2, tie_word_embeddings=False)
    tensors = examine(open_source(str(folder))).tensors()
    assert tensors["lm_head.weight"].start != tensors["embed_tokens.weight"].start


@pytest.mark.parametrize("form", ["null", "absent"])
def test_cfg_02_null_global_kv_heads(e2b: Path, form: str) -> None:
    def change(config: dict[str, dict[str, object]]) -> None:
        config["text_config"]["num_global_key_value_heads"] = None
        if form == "absent":
            del config["text_config"]["num_global_key_value_heads"]

    edit_json(e2b, "config.json", change)
    report = inspect(e2b)
    clean(report)
    assert {layer["kv_heads"] for layer in report.geometry["layers"]} == {1}


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_attn_13_and_attn_14_float16(made: Path, tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    folder.mkdir()
    for file in (made / family).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit_tensors(folder, lambda t: t.update({n: encode(decode(v), "F16") for n, v in t.items()}))
    report = inspect(folder)
    assert {f.kind for f in report.errors} == {"dtype"}
    assert "bfloat16" in report.errors[0].message


def test_tok_06_stop_ids_follow_the_checkpoint(gemma4: Path, gemma3: Path) -> None:
    assert inspect(gemma4).stop_token_ids == (1, 50, 106)
    assert inspect(gemma3).stop_token_ids == (1, 106)


def test_report_has_the_fields_others_rely_on(gemma4: Path) -> None:
    scalar = TEXT4 + "layers.0.layer_scalar"
    edit_tensors(gemma4, lambda t: t.update({scalar: encode(np.zeros(1, np.float32))}))
    report = json.loads(json.dumps(inspect(gemma4).to_json()))
    assert report["verdict"] == "broken"
    assert set(report["findings"][0]) == {"kind", "severity", "tensor", "file", "message"}
    assert set(report["tensors"]) == {"used", "tied", "derived", "skipped", "unexplained"}
    assert set(report["buffers"][0]) == {"tensor", "shape", "dtype", "min", "max"}
    assert set(report["chat_template"]) == {"present", "source", "sha256"}
    assert report["stop_token_ids"] == [1, 50, 106]
    assert report["geometry"]["family"] == "gemma4"
