from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gemma_neuron.checkpoint import ledger as ledger_module
from gemma_neuron.checkpoint.audit import examine
from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.errors import AuditFailed
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
from tests.tiny import decode, encode, write_tiny_gemma4

TABLE4 = TEXT4 + "embed_tokens.weight"
SCALAR = TEXT4 + "layers.3.layer_scalar"


def test_every_tensor_is_used_once(gemma4: Path) -> None:
    found = examine(open_source(str(gemma4)))
    clean(found.report)
    counts = found.report.tensors
    assert (counts.used, counts.unexplained) == (len(found.index.tensors), 0)
    assert (counts.tied, counts.skipped) == (0, 0)
    assert counts.derived == 3  # rotary frequencies of two kinds, and the rank
    entries = found.tensors()
    assert entries["layers.3.layer_scalar"].name == SCALAR
    assert len({entry.start for entry in entries.values()}) == len(entries)


def test_the_ledger_names_every_tensor_and_every_parameter_once(e2b: Path) -> None:
    own = TEXT4 + "layers.0.self_attn.k_proj.weight"
    extra = {
        "lm_head.weight": TABLE4,
        TEXT4 + "layers.7.self_attn.k_proj.weight": own,
        "model.vision_tower.encoder.layers.0.norm.weight": own,
        TEXT4 + "layers.0.surplus": own,
    }
    edit_tensors(e2b, lambda t: t.update({name: t[like] for name, like in extra.items()}))
    found = examine(open_source(str(e2b)))
    rows = found.report.ledger
    assert sorted(row.tensor for row in rows if row.tensor) == sorted(found.index.tensors)
    assert found.table is not None
    assert sorted(row.model for row in rows if row.model) == sorted(found.table.by_name())
    by_name = {row.tensor: (row.status, row.model, row.rule) for row in rows}
    assert [by_name[name] for name in extra] == [
        ("tied", "", "repeats embed_tokens.weight"),
        ("skipped", "", "borrowed-kv"),
        ("skipped", "", "vision"),
        ("unexplained", "", ""),
    ]
    assert {row.model for row in rows if row.status == "derived"} == {
        "rank", "rope.sliding.inv_freq", "rope.global.inv_freq"
    }  # fmt: skip


def test_thousands_of_surplus_tensors_are_not_as_many_lines(gemma4: Path) -> None:
    some = encode(np.ones((1,), np.float32))
    edit_tensors(gemma4, lambda t: t.update({f"surplus.{i}": some for i in range(2500)}))
    report = inspect(gemma4)
    found = of_kind(report, "unexpected")
    assert len(found) == 1001
    assert "1,500 more" in found[-1].message
    assert report.tensors.unexplained == 2500


def test_a_broken_report_gives_no_tensors(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.pop(SCALAR))
    with pytest.raises(AuditFailed, match=r"layers\.3\.layer_scalar") as caught:
        examine(open_source(str(gemma4))).tensors()
    assert caught.value.exit_code == 3


def test_missing_buffer_says_how_buffers_get_lost(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.pop(SCALAR))
    found = only(inspect(gemma4), "missing")
    assert found.tensor == SCALAR
    assert "persistent buffer" in found.message


def test_missing_weight(gemma4: Path) -> None:
    name = TEXT4 + "layers.0.mlp.up_proj.weight"
    edit_tensors(gemma4, lambda t: t.pop(name))
    found = only(inspect(gemma4), "missing")
    assert found.tensor == name
    assert "[128, 64]" in found.message


def test_unexpected_tensor_gets_a_guess(gemma4: Path) -> None:
    name = TEXT4 + "layers.0.mlp.up_proj.weight"
    edit_tensors(gemma4, lambda t: t.update({name.replace("up_proj", "upproj"): t.pop(name)}))
    report = inspect(gemma4)
    [unexpected] = of_kind(report, "unexpected")
    assert "did you mean layers.0.mlp.up_proj.weight?" in unexpected.message
    assert unexpected.file == "model.safetensors"
    assert report.tensors.unexplained == 1
    assert len(report.findings) == 2


def test_a_wrong_prefix_everywhere_is_reported_in_time(gemma4: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors["transformer." + name] = tensors.pop(name)

    edit_tensors(gemma4, rename)
    report = inspect(gemma4)
    assert len(of_kind(report, "unexpected")) == len(of_kind(report, "missing")) > 80


def test_wrong_shape(gemma4: Path) -> None:
    name = TEXT4 + "layers.5.self_attn.k_proj.weight"
    edit_tensors(gemma4, lambda t: t.update({name: encode(np.ones((128, 64), np.float32))}))
    found = only(inspect(gemma4), "shape")
    assert (found.tensor, "[128, 64]" in found.message) == (name, True)
    assert "[64, 64]" in found.message  # 4 global KV heads of 16


@pytest.mark.parametrize("dtype", ["F16", "I32"])
def test_dtypes_that_do_not_work(gemma4: Path, dtype: str) -> None:
    name = TEXT4 + "norm.weight"
    width = {"F16": 2, "I32": 4}[dtype]
    edit_tensors(gemma4, lambda t: t.update({name: (dtype, (64,), b"\1" * 64 * width)}))
    found = only(inspect(gemma4), "dtype")
    assert found.tensor == name
    assert found.message.startswith(name)
    assert "bfloat16" in found.message or "BF16" in found.message


def test_mixed_bfloat16_and_float32_is_a_warning(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({SCALAR: encode(decode(t[SCALAR]), "F32")}))
    found = only(inspect(gemma4), "dtype", "warning")
    assert found.tensor == SCALAR


def test_two_names_for_one_parameter(gemma4: Path) -> None:
    edit_tensors(gemma4, lambda t: t.update({"model.layers.3.layer_scalar": t[SCALAR]}))
    assert only(inspect(gemma4), "duplicate-tensor").tensor == "model.layers.3.layer_scalar"


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"]
)
def test_equal_tied_copy_is_counted(gemma4: Path, name: str) -> None:
    edit_tensors(gemma4, lambda t: t.update({name: t[TABLE4]}))
    report = inspect(gemma4)
    clean(report)
    assert report.tensors.tied == 1


def test_tied_copy_of_another_shape(gemma4: Path) -> None:
    half = encode(np.ones((256, 64), np.float32))
    edit_tensors(gemma4, lambda t: t.update({"lm_head.weight": half}))
    assert only(inspect(gemma4), "shape").tensor == "lm_head.weight"


def test_large_tied_copy_is_sampled_unless_all_values_are_read(
    gemma4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "COMPARE_ALL_BYTES", 1024)
    monkeypatch.setattr("gemma_neuron.checkpoint.values.PIECE_BYTES", 256)

    def last_value(tensors: Tensors) -> None:
        dtype, shape, data = tensors[TABLE4]
        tensors["lm_head.weight"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))

    edit_tensors(gemma4, last_value)
    clean(inspect(gemma4))
    found = of_kind(inspect(gemma4, values=True), "tied-differs")
    assert [f.tensor for f in found] == ["lm_head.weight"]
    edit_tensors(gemma4, lambda t: t.update({"lm_head.weight": encode(-decode(t[TABLE4]))}))
    only(inspect(gemma4), "tied-differs")


@pytest.mark.parametrize("kept", ["all", "none", "keys only"])
def test_borrowed_kv_may_be_there_or_not(e2b: Path, kept: str) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(5, 10):
            for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
                if kept == "all" or (kept == "keys only" and part[0] == "k"):
                    own = tensors[f"{TEXT4}layers.{layer - 5}.self_attn.{part}"]
                    tensors[f"{TEXT4}layers.{layer}.self_attn.{part}"] = own

    edit_tensors(e2b, add)
    report = inspect(e2b)
    clean(report)
    expected = {"all": 15, "none": 0, "keys only": 10}[kept]
    assert report.tensors.skipped == expected
    assert report.skipped_by_rule == ({"borrowed-kv": expected} if expected else {})


def test_missing_donor_kv_is_an_error(e2b: Path) -> None:
    name = TEXT4 + "layers.4.self_attn.v_proj.weight"
    edit_tensors(e2b, lambda t: t.pop(name))
    assert only(inspect(e2b), "missing").tensor == name


def test_other_modalities_are_skipped_by_rule(gemma4: Path) -> None:
    some = encode(np.ones((3,), np.float32))
    names = [
        "model.vision_tower.encoder.layers.5.layer_scalar",
        "model.embed_vision.embedding_projection.weight",
        "model.vision_embedder.patch_dense.weight",
        "model.audio_tower.layers.5.norm.weight",
        "model.embed_audio.embedding_projection.weight",
    ]
    edit_tensors(gemma4, lambda t: t.update(dict.fromkeys(names, some)))
    report = inspect(gemma4)
    clean(report)
    assert report.skipped_by_rule == {"audio": 2, "vision": 3}


def test_vision_layer_never_stands_in_for_a_text_layer(gemma4: Path) -> None:
    def move(tensors: Tensors) -> None:
        tensors["model.vision_tower.encoder.layers.3.layer_scalar"] = tensors.pop(SCALAR)

    edit_tensors(gemma4, move)
    assert only(inspect(gemma4), "missing").tensor == SCALAR


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_older_prefixes(gemma4: Path, prefix: str) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(TEXT4, prefix)] = tensors.pop(name)

    edit_tensors(gemma4, rename)
    clean(inspect(gemma4))
    edit_tensors(gemma4, lambda t: t.pop(prefix + "layers.3.layer_scalar"))
    assert only(inspect(gemma4), "missing").tensor == prefix + "layers.3.layer_scalar"


def test_experts_are_accounted_for(tmp_path: Path) -> None:
    folder = write_tiny_gemma4(
        tmp_path / "moe", layers=2, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    clean(inspect(folder))
    name = TEXT4 + "layers.1.router.per_expert_scale"
    edit_tensors(folder, lambda t: t.pop(name))
    assert only(inspect(folder), "missing").tensor == name


def test_config_of_another_size(gemma4: Path) -> None:
    edit_json(gemma4, "config.json", lambda c: c["text_config"].update(intermediate_size=64))
    report = inspect(gemma4)
    assert {f.kind for f in report.findings} == {"shape"}
    assert len(report.findings) == 18


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_config_names_a_dtype_that_is_not_run(gemma4: Path, dtype: str) -> None:
    edit_json(gemma4, "config.json", lambda c: c["text_config"].update(dtype=dtype))
    found = only(inspect(gemma4), "dtype", "warning")
    assert (found.file, dtype in found.message) == ("config.json", True)


def test_a_config_key_that_nobody_acts_on_is_a_warning(gemma4: Path) -> None:
    edit_json(gemma4, "config.json", lambda c: c["text_config"].update(mtp_layers=2))
    found = only(inspect(gemma4), "unexpected", "warning")
    assert (found.file, "mtp_layers" in found.message) == ("config.json", True)
