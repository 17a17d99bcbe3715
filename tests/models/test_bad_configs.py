"""Configs that contradict themselves, say what cannot be, or say what this toolkit does not act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.models.registry import read_config_notes, read_geometry
from tests.real_configs import real_config, text_of

PER_LAYER = {"05": {"head_dim": 512, "num_key_value_heads": 4}}
Edit = Callable[[dict[str, Any], dict[str, Any]], object]
# name: (edit of whole and text part, words the message must have)
BAD: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "text_config a list": (lambda c, t: c.update(text_config=[1]), ("text_config",)),
    "no model_type": (lambda c, t: c.pop("model_type"), ("model_type",)),
    "unknown model_type": (lambda c, t: c.update(model_type="gemma5"), ("gemma5", "gemma4")),
    "text part of another family": (
        lambda c, t: t.update(model_type="gemma3_text"), ("'gemma4'", "'gemma3_text'")),
    "two hidden sizes": (lambda c, t: c.update(hidden_size=5000), ("hidden_size", "5000", "5376")),
    "two layer counts": (lambda c, t: c.update(num_hidden_layers=61), ("num_hidden_layers", "61")),
    "both schemas, head_dim": (
        lambda c, t: t.update(per_layer_config={f"{i:02}": {"head_dim": 128, "num_key_value_heads": 4}
                                                for i in range(5, 60, 6)}),
        ("layer 5", "128", "512", "global_head_dim")),
    "both schemas, KV heads": (
        lambda c, t: t.update(per_layer_config={str(i): {"head_dim": 512} for i in range(5, 60, 6)}),
        ("layer 5", "16", "num_global_key_value_heads")),
    "layer past the end": (
        lambda c, t: new_schema(t, {"60": {"head_dim": 512}}), ("layer 60", "60 layers")),
    "layer named twice": (lambda c, t: new_schema(t, {"5": {}, "05": {}}), ("layer 05 twice",)),
    "layer with a name": (lambda c, t: new_schema(t, {"five": {}}), ("five",)),
    "layer number of thousands of digits": (lambda c, t: new_schema(t, {"9" * 5000: {}}), ("999",)),
    "per_layer_config a list": (lambda c, t: new_schema(t, [1]), ("per_layer_config",)),
    "a layer's values a number": (lambda c, t: new_schema(t, {"5": 7}), ("layer 5",)),
    "a layer with a key of its own": (
        lambda c, t: new_schema(t, {"05": {"intermediate_size": 7}}), ("layer 5", "intermediate_size")),
    "a layer that is skipped": (lambda c, t: new_schema(t, {"05": {"skip": ["mlp"]}}), ("skip",)),
    "a text for a layer's head_dim": (
        lambda c, t: new_schema(t, {"05": {"head_dim": "512"}}), ("head_dim of layer 5",)),
    "layers of one kind unlike": (lambda c, t: new_schema(t, PER_LAYER), ("global layers", "512 x 4")),
    "types for another count": (lambda c, t: t["layer_types"].pop(), ("59 entries", "60 layers")),
    "an unknown type": (
        lambda c, t: t["layer_types"].__setitem__(3, "chunked_attention"), ("chunked_attention",)),
    "a number for a type": (lambda c, t: t["layer_types"].__setitem__(3, [3]), ("[3]",)),
    "types a number": (lambda c, t: t.update(layer_types=6), ("layer_types",)),
    "a sliding last layer": (
        lambda c, t: t["layer_types"].__setitem__(59, "sliding_attention"), ("layer 59",)),
    "a window of null": (lambda c, t: t.update(sliding_window=None), ("sliding_window", "layer 0")),
    "a window of zero": (lambda c, t: t.update(sliding_window=0), ("sliding_window",)),
    "no hidden_size": (lambda c, t: t.pop("hidden_size"), ("hidden_size",)),
    "hidden_size of null": (lambda c, t: t.update(hidden_size=None), ("hidden_size",)),
    "hidden_size true": (lambda c, t: t.update(hidden_size=True), ("hidden_size", "True")),
    "hidden_size a text": (lambda c, t: t.update(hidden_size="5376"), ("hidden_size", "'5376'")),
    "hidden_size fractional": (lambda c, t: t.update(hidden_size=5376.0), ("hidden_size",)),
    "a vocabulary past 31 bits": (lambda c, t: t.update(vocab_size=2**40), ("vocab_size",)),
    "a billion layers": (
        lambda c, t: (t.update(num_hidden_layers=10**9), t.pop("layer_types")), ("num_hidden_layers",)),
    "no KV heads": (lambda c, t: t.update(num_key_value_heads=0), ("num_key_value_heads",)),
    "KV heads that do not divide": (
        lambda c, t: t.update(num_key_value_heads=5), ("layer 0", "32 query heads", "5 KV heads")),
    "an odd head": (lambda c, t: t.update(head_dim=255), ("head_dim 255", "layer 0")),
    "eps infinite": (lambda c, t: t.update(rms_norm_eps=float("inf")), ("rms_norm_eps",)),
    "eps of 400 digits": (lambda c, t: t.update(rms_norm_eps=10**400), ("rms_norm_eps",)),
    "soft-cap negative": (lambda c, t: t.update(final_logit_softcapping=-30), ("softcapping",)),
    "flag a text": (lambda c, t: t.update(attention_k_eq_v="yes"), ("attention_k_eq_v", "'yes'")),
    "all layers share": (lambda c, t: t.update(num_kv_shared_layers=60), ("num_kv_shared_layers",)),
    "no global donor": (lambda c, t: t.update(num_kv_shared_layers=56), ("no global layer",)),
    "more experts than there are": (
        lambda c, t: t.update(enable_moe_block=True, num_experts=4, top_k_experts=8,
                              moe_intermediate_size=9), ("top_k_experts 8", "num_experts 4")),
    "experts without a count": (lambda c, t: t.update(enable_moe_block=True), ("num_experts",)),
    "per-layer embeddings without rows": (
        lambda c, t: t.update(hidden_size_per_layer_input=8, vocab_size_per_layer_input=0),
        ("vocab_size_per_layer_input",)),
    "bidirectional": (lambda c, t: t.update(use_bidirectional_attention="all"), ("bidirectional",)),
    "biases": (lambda c, t: t.update(attention_bias=True), ("attention_bias",)),
    "another activation": (lambda c, t: t.update(hidden_activation="silu"), ("'silu'",)),
    "rope flat": (
        lambda c, t: t.update(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        ("rope_parameters", "full_attention")),
    "rope of one type only": (
        lambda c, t: t["rope_parameters"].pop("full_attention"), ("lacks full_attention",)),
    "rope a list": (lambda c, t: t.update(rope_parameters=[]), ("rope_parameters",)),
    "rope entry a text": (lambda c, t: t["rope_parameters"].update(full_attention="yarn"), ("full_attention",)),
    "rope yarn": (
        lambda c, t: t["rope_parameters"]["full_attention"].update(rope_type="yarn"), ("yarn",)),
    "rope with an unknown key": (
        lambda c, t: t["rope_parameters"]["full_attention"].update(beta_fast=32), ("beta_fast",)),
    "rope of two types": (
        lambda c, t: t["rope_parameters"]["full_attention"].update(type="linear"), ("linear",)),
    "rope without theta": (
        lambda c, t: t["rope_parameters"]["full_attention"].pop("rope_theta"), ("lacks rope_theta",)),
    "theta a text": (
        lambda c, t: t["rope_parameters"]["full_attention"].update(rope_theta="1e6"), ("rope_theta",)),
    "a quarter turned by the default form": (
        lambda c, t: t["rope_parameters"]["sliding_attention"].update(partial_rotary_factor=0.25),
        ("partial_rotary_factor 0.25",)),
    "more than all turned": (
        lambda c, t: t["rope_parameters"]["full_attention"].update(partial_rotary_factor=1.5), ("1.5",)),
    "scaling that Gemma 4 does not read": (
        lambda c, t: t.update(rope_scaling={"rope_type": "linear", "factor": 8}), ("rope_scaling",)),
}  # fmt: skip


def new_schema(text: dict[str, Any], table: object) -> None:
    for key in ("global_head_dim", "num_global_key_value_heads"):
        del text[key]
    text["per_layer_config"] = table


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_refused_by_the_name_of_its_key(case: str) -> None:
    edit, words = BAD[case]
    config = real_config("gemma-4-31B")
    edit(config, config["text_config"])
    with pytest.raises(GemmaNeuronError) as caught:
        read_geometry(config)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert all(word in caught.value.message for word in words), caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("key", ["hidden_size_per_layer_input", "enable_moe_block"])
def test_the_unified_form_has_neither_experts_nor_per_layer_embeddings(key: str) -> None:
    config = real_config("gemma-4-12B")
    config["text_config"][key] = 8 if key.startswith("hidden") else True
    with pytest.raises(GemmaNeuronError, match=f"{key} is .*unified"):
        read_geometry(config)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "500000.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": [8]}, "rope_scaling"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config"),
    ],
)  # fmt: skip
def test_bad_configs_of_gemma3(edit: dict[str, Any], words: str) -> None:
    config = real_config("gemma-3-4b")
    config["text_config"] |= edit
    with pytest.raises(GemmaNeuronError, match=words):
        read_geometry(config)


def test_a_scaling_beside_rope_parameters_is_merged_as_transformers_does() -> None:
    config = real_config("gemma-3-4b")
    config["text_config"]["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "default"},
    }
    assert read_geometry(config) == read_geometry(real_config("gemma-3-4b"))


@pytest.mark.parametrize(
    ("size", "edit", "words"),
    [
        ("gemma-4-31B", lambda c, t: t.update(mtp_layers=2, zeta=None), ("mtp_layers",)),
        ("gemma-4-31B", lambda c, t: c.update(attn_mechanism="x"), ("attn_mechanism",)),
        ("gemma-4-31B", lambda c, t: t.update({f"k{i}": 1 for i in range(20)}), ("and 12 more",)),
        ("gemma-4-31B", lambda c, t: t.update(tie_word_embeddings=False),
         ("tie_word_embeddings False", "top says True", "True is taken")),
        ("gemma-4-31B", lambda c, t: (c.pop("tie_word_embeddings"), t.update(tie_word_embeddings=False)),
         ("tie_word_embeddings False", "top leaves it out", "True is taken")),
        ("gemma-4-31B", lambda c, t: c.update(tie_word_embeddings=False),
         ("tie_word_embeddings True", "top says False", "False is taken")),
        ("gemma-4-E2B", lambda c, t: t.update(num_global_key_value_heads=2),
         ("num_global_key_value_heads 2", "attention_k_eq_v")),
        ("gemma-3-270m", lambda c, t: t.update(sliding_window_pattern=5), ("sliding_window_pattern 5",)),
    ],
)  # fmt: skip
def test_what_is_ignored_is_said(size: str, edit: Edit, words: tuple[str, ...]) -> None:
    config = real_config(size)
    edit(config, text_of(config))
    read_geometry(config)
    notes = " ".join(read_config_notes(config))
    assert all(word in notes for word in words), notes
    assert "zeta" not in notes
