"""Geometry and tensors of every released size, against their published numbers and against stock transformers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.models.registry import read_config_notes, read_geometry, read_parameter_table
from gemma_neuron.models.rotary import inverse_frequencies
from tests.real_configs import GEMMA3, GEMMA4, NAMES, real_config, stock_model, text_of

# hidden, sliding layers, global layers, query heads, KV heads sliding and global, head_dim sliding and global,
# MLP width, window, longest context, vocabulary, text parameters (buffers included)
PUBLISHED: dict[str, tuple[int, ...]] = {
    "gemma-3-270m": (640, 15, 3, 4, 1, 1, 256, 256, 2048, 512, 32768, 262144, 268_098_176),
    "gemma-3-1b": (1152, 22, 4, 4, 1, 1, 256, 256, 6912, 512, 32768, 262144, 999_885_952),
    "gemma-3-4b": (2560, 29, 5, 8, 4, 4, 256, 256, 10240, 1024, 131072, 262208, 3_880_263_168),
    "gemma-3-12b": (3840, 40, 8, 16, 8, 8, 256, 256, 15360, 1024, 131072, 262208, 11_766_034_176),
    "gemma-3-27b": (5376, 52, 10, 32, 16, 16, 128, 128, 21504, 1024, 131072, 262208, 27_009_346_304),
    "gemma-4-E2B": (1536, 28, 7, 8, 1, 1, 256, 512, 6144, 512, 131072, 262144, 4_628_569_379),
    "gemma-4-E4B": (2560, 35, 7, 8, 2, 2, 256, 512, 10240, 512, 131072, 262144, 7_463_013_418),
    "gemma-4-12B": (3840, 40, 8, 16, 8, 1, 256, 512, 15360, 1024, 262144, 262144, 11_907_350_320),
    "gemma-4-26B-A4B": (2816, 25, 5, 16, 8, 2, 256, 512, 2112, 1024, 262144, 262144, 25_233_141_790),
    "gemma-4-31B": (5376, 50, 10, 32, 16, 4, 256, 512, 21504, 1024, 262144, 262144, 30_697_345_340),
}  # fmt: skip
NULLABLE = (
    "num_global_key_value_heads", "use_bidirectional_attention", "moe_intermediate_size", "num_experts",
    "top_k_experts", "per_layer_config", "rope_scaling", "attn_logit_softcapping", "pad_token_id",
)  # fmt: skip


def of(name: str) -> ModelGeometry:
    return read_geometry(real_config(name))


def parameters(geometry: ModelGeometry) -> int:
    table = read_parameter_table(geometry)
    return sum(math.prod(spec.shape) for spec in table if spec.origin == "checkpoint")


def sample(geometry: ModelGeometry, kind: str) -> LayerGeometry:
    return next(layer for layer in geometry.layers if layer.kind == kind)


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers(name: str) -> None:
    g = of(name)
    kinds = [layer.kind for layer in g.layers]
    sliding, wide = sample(g, "sliding"), sample(g, "global")
    assert PUBLISHED[name] == (
        g.hidden, kinds.count("sliding"), kinds.count("global"), sliding.query_heads, sliding.kv_heads,
        wide.kv_heads, sliding.head_dim, wide.head_dim, g.layers[0].intermediate, g.window, g.max_context,
        g.vocab, parameters(g),
    )  # fmt: skip
    assert (g.dtype, g.tied, g.norm_eps) == ("bfloat16", True, 1e-6)
    assert g.softcap == (30.0 if name in GEMMA4 else None)
    assert kinds[-1] == ("global" if name in GEMMA4 else kinds[-1])


def test_oddities_of_the_sizes() -> None:
    e2b, e4b, moe, dense = (of(f"gemma-4-{size}") for size in ("E2B", "E4B", "26B-A4B", "31B"))
    assert {layer.kv_donor for layer in e2b.layers} == {None, 13, 14}
    assert [layer.index for layer in e2b.layers if layer.kv_donor is not None] == [*range(15, 35)]
    assert [layer.intermediate for layer in e2b.layers] == [6144] * 15 + [12288] * 20
    assert {layer.kv_donor for layer in e4b.layers} == {None, 22, 23}
    assert {layer.intermediate for layer in e4b.layers} == {10240}
    assert (e2b.per_layer_input, e2b.per_layer_vocab, dense.per_layer_input) == (256, 262144, 0)
    assert moe.experts is not None
    assert (moe.experts.experts, moe.experts.top_k, moe.experts.intermediate) == (128, 8, 704)
    assert [layer.index for layer in dense.layers if layer.value_is_key] == [*range(5, 60, 6)]
    assert not any(layer.value_is_key for layer in e2b.layers)
    # as transformers' convert_gemma3_weights.py makes them
    for name in GEMMA3:
        g, large = of(name), name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b")
        scale = (5376 // 32 if name == "gemma-3-27b" else 256) ** -0.5
        assert g.attention_scale == pytest.approx(scale)
        assert (g.rope["global"].theta, g.rope["sliding"].theta) == (1e6, 1e4)
        assert (g.rope["global"].factor, g.rope["sliding"].factor) == (8.0 if large else 1.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_stock_is_used_or_skipped_by_a_rule(name: str) -> None:
    model = stock_model(name)
    table = read_parameter_table(of(name))
    mine = {spec.name: spec for spec in table if spec.origin == "checkpoint"}
    found: dict[str, tuple[int, ...]] = {}
    skipped = set()
    for key, tensor in model.state_dict().items():
        rule = table.skip_rule(key)
        if rule is not None:
            skipped.add(rule)
        elif key not in table.tied:
            found[table.local_name(key) or key] = tuple(tensor.shape)
    assert found == {key: spec.shape for key, spec in mine.items()}
    towers: dict[str, set[str]] = {"gemma-3-270m": set(), "gemma-3-1b": set()}
    assert skipped == towers.get(name, {"vision"} if name in GEMMA3 else {"vision", "audio"})
    state = set(model.state_dict())
    buffers = {table.local_name(key) for key, _ in model.named_buffers() if key in state}
    text_buffers = {key for key in buffers if key in mine}
    assert text_buffers == {key for key, spec in mine.items() if spec.buffer}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_is_stocks(name: str) -> None:
    model = stock_model(name)
    text = getattr(model.model, "language_model", model.model)
    counted = {key: tensor.numel() for key, tensor in text.state_dict().items()}
    assert sum(counted.values()) == PUBLISHED[name][-1]


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_built_as_stock_builds_them(name: str) -> None:
    g, model = of(name), stock_model(name)
    text = getattr(model.model, "language_model", model.model)
    config = model.config.get_text_config()
    for layer, theirs in zip(g.layers, text.layers, strict=True):
        attention = theirs.self_attn
        assert attention.head_dim == layer.head_dim
        assert attention.scaling == pytest.approx(g.attention_scale)
        assert attention.sliding_window == (g.window if layer.kind == "sliding" else None)
        assert theirs.mlp.gate_proj.weight.shape[0] == layer.intermediate
        assert attention.q_proj.weight.shape[0] == layer.query_heads * layer.head_dim
        assert getattr(attention, "is_kv_shared_layer", False) == (layer.kv_donor is not None)
        if layer.kv_donor is None:
            assert attention.k_proj.weight.shape[0] == layer.kv_heads * layer.head_dim
            assert (getattr(attention, "v_proj", None) is None) == layer.value_is_key
    assert config.final_logit_softcapping == g.softcap
    assert config.max_position_embeddings == g.max_context
    rotary = type(text.rotary_emb)(config)  # on the cpu: its frequencies are values
    for kind, theirs_named in (("sliding", "sliding_attention"), ("global", "full_attention")):
        layer = sample(g, kind)
        theirs = getattr(rotary, f"{theirs_named}_inv_freq")
        ours = inverse_frequencies(g.rope[layer.kind], layer.head_dim)
        padded = torch.cat([theirs, torch.zeros(len(ours) - len(theirs))])
        assert torch.equal(ours, padded)


def written_by_stock(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(stock_model(name).config.to_json_string())
    return config


@pytest.mark.parametrize("name", NAMES)
def test_both_schemas_nested_and_flat_are_one_geometry(name: str) -> None:
    config, g = real_config(name), of(name)
    stock = written_by_stock(name)
    if name in GEMMA4:
        keys = list(text_of(stock)["per_layer_config"])
        assert {len(key) for key in keys} == {2}  # zero-padded
        assert "global_head_dim" not in text_of(stock)
    assert read_geometry(stock) == g
    text = text_of(config)
    flat = text | {"dtype": "bfloat16"}
    flat.setdefault("model_type", config["model_type"])
    assert read_geometry(flat) == g
    assert read_geometry({"model_type": flat["model_type"], "text_config": text}) == g
    assert read_config_notes(config) == read_config_notes(stock) == read_config_notes(flat) == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["null", "absent"])
def test_nulls_count_as_absent(name: str, form: str) -> None:
    config = real_config(name)
    for key in NULLABLE:
        if text_of(config).get(key) is None:
            text_of(config)[key] = None
            if form == "absent":
                del text_of(config)[key]
    assert read_geometry(config) == of(name)


def test_a_null_global_head_dim_is_as_sliding_and_an_absent_one_is_stocks() -> None:
    config = real_config("gemma-4-31B")
    config["text_config"]["global_head_dim"] = None
    assert sample(read_geometry(config), "global").head_dim == 256
    del config["text_config"]["global_head_dim"]
    assert sample(read_geometry(config), "global").head_dim == 512


@pytest.mark.parametrize("name", GEMMA4)
def test_what_a_file_leaves_out_is_what_stock_takes(name: str) -> None:
    """Files written as a difference from the class leave out every value equal to its default."""
    import transformers

    config = real_config(name)
    text = config["text_config"]
    defaults = transformers.AutoConfig.for_model(text["model_type"]).to_dict()
    kept = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size",
            "num_attention_heads", "num_key_value_heads")  # fmt: skip
    full = copy.deepcopy(config)
    for key in [key for key in text if key not in kept and text[key] == defaults.get(key, "?")]:
        del text[key]
    assert len(text) < len(full["text_config"]) - 3
    assert read_geometry(config) == read_geometry(full)


def test_configs_are_what_the_tests_say_they_are() -> None:
    assert sorted(
        path.stem for path in (Path(__file__).parents[1] / "data/configs").iterdir()
    ) == sorted(NAMES)
