"""The reference, one layer in memory at a time, against the ordinary whole model of stock transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemma_neuron.errors import ReferenceUnavailableError
from gemma_neuron.validation.prompts import GreedyPrompt
from gemma_neuron.validation.reference import open_reference
from tests.stock import stock_greedy, stock_logits, stock_model
from tests.tiny import (
    layer_types,
    read_safetensors,
    write_safetensors,
    write_sharded,
    write_tiny_gemma3,
    write_tiny_gemma4,
)

ONE_LAYER, WHOLE = 1, 1 << 40
"""Bytes the reference may use: too little to keep a layer, and as much as it wants."""
TEXTS = [list(range(100, 140)), [2, *range(300, 305)], [7]]
E_MODEL = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "layer_types": layer_types(6, every=3),
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
EXPERTS = {
    "enable_moe_block": True,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "top_k_experts": 2,
}
KINDS: dict[str, Any] = {
    "gemma3": {},
    "dense": {},
    "per-layer-inputs": E_MODEL,
    "experts": EXPERTS,
    "untied": {"tie_word_embeddings": False},
    "unified": {"model_type": "gemma4_unified_text"},
}


def checkpoint(folder: Path, kind: str) -> Path:
    if kind == "gemma3":
        return write_tiny_gemma3(folder, layers=6)
    return write_tiny_gemma4(folder, layers=6, **KINDS[kind])


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source"), request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_whole_models_bit_for_bit(source: Path, dtype: str) -> None:
    want = stock_logits(source, TEXTS, dtype)
    for memory in (ONE_LAYER, WHOLE):
        reference = open_reference(source, dtype, memory)
        assert reference.resident == (memory == WHOLE)
        for text, slices in zip(want, reference.read(TEXTS), strict=True):
            assert np.array_equal(text, np.concatenate([rows for _, rows in slices]))


def test_prompts_together_say_what_each_says_alone(source: Path) -> None:
    """Past the window of 16, from prompts of different lengths, one of which ends sooner."""
    model = stock_model(source)
    asked = [(TEXTS[0][:30], 12), (TEXTS[1], 20), (TEXTS[0][:3], 5)]
    prompts = [
        GreedyPrompt(name=str(i), ids=tuple(ids), limit=limit, stop_ids=())
        for i, (ids, limit) in enumerate(asked)
    ]
    for memory in (ONE_LAYER, WHOLE):
        found = open_reference(source, "float32", memory).greedy(prompts, keep=3)
        for (ids, limit), steps in zip(asked, found, strict=True):
            tokens, logits = stock_greedy(model, ids, limit)
            assert [step.token for step in steps] == tokens
            np.testing.assert_allclose([s.top_values[0] for s in steps], logits, rtol=1e-5)


def test_stop_id_is_the_last_token(source: Path) -> None:
    reference = open_reference(source, "float32")
    free = GreedyPrompt(name="free", ids=tuple(TEXTS[1]), limit=6, stop_ids=())
    (steps,) = reference.greedy([free], keep=1)
    stop = steps[2].token
    count = [step.token for step in steps].index(stop) + 1
    held = GreedyPrompt(name="held", ids=free.ids, limit=6, stop_ids=(stop,))
    stopped, other = reference.greedy([held, free], keep=1)
    assert len(stopped) == count and stopped[-1].token == stop and len(other) == 6


def test_hidden_states_are_stock_s(source: Path) -> None:
    with torch.inference_mode():
        model = stock_model(source).model
        caught: list[torch.Tensor] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda _, __, out: caught.append(out[0].clone()))
        model(input_ids=torch.tensor([TEXTS[0]]), use_cache=False)
    found = list(open_reference(source, "float32", ONE_LAYER).hidden_states(TEXTS[0]))
    assert len(found) == len(caught)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(found, caught, strict=True))


def test_little_memory_generates_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma_neuron.validation import reference as module

    source = checkpoint(tmp_path, "dense")
    prompts = [
        GreedyPrompt(name=str(n), ids=tuple(TEXTS[0][:n]), limit=4, stop_ids=())
        for n in (9, 3, 20, 4)
    ]
    together = open_reference(source, "float32").greedy(prompts, keep=2)
    reference = open_reference(source, "float32", ONE_LAYER)
    monkeypatch.setattr(module, "LEAST_MEMORY", reference._group_bytes(prompts[1::2]))
    lines: list[str] = []
    apart = reference.greedy(prompts, keep=2, progress=lines.append)
    assert [[s.token for s in steps] for steps in apart] == [
        [s.token for s in steps] for steps in together
    ]
    assert any("group 3 of 3" in line for line in lines)


def test_sharded_and_flat_folders_give_one_reference(tmp_path: Path) -> None:
    nested = checkpoint(tmp_path / "nested", "dense")
    want = stock_logits(nested, TEXTS)
    config = json.loads((nested / "config.json").read_text())["text_config"]
    tensors = read_safetensors(nested / "model.safetensors")
    flat, sharded, old = (tmp_path / name for name in ("flat", "sharded", "old"))
    for folder in (flat, sharded, old):
        folder.mkdir()
    (flat / "config.json").write_text(json.dumps(config))
    spelt = {k.replace("model.language_model.", "model."): v for k, v in tensors.items()}
    write_safetensors(flat / "model.safetensors", spelt)
    shutil.copy(nested / "config.json", sharded)
    write_sharded(sharded, tensors)
    shutil.copy(nested / "config.json", old)
    spelt = {
        k.replace("model.language_model.", "language_model.model."): v for k, v in tensors.items()
    }
    write_safetensors(old / "model.safetensors", spelt)
    for folder in (flat, sharded, old):
        (read,) = open_reference(folder, "float32").read(TEXTS[:1])
        assert np.array_equal(want[0], np.concatenate([rows for _, rows in read]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.language_model.layers.1.layer_scalar"), "1 tensors missing"),
        (
            lambda t: t.update(
                {"model.language_model.layers.1.odd": t["model.language_model.norm.weight"]}
            ),
            "1 without use",
        ),
        (
            lambda t: t.update(
                {
                    "model.language_model.norm.weight": t[
                        "model.language_model.layers.1.layer_scalar"
                    ]
                }
            ),
            "1 of another shape",
        ),
    ],
)
def test_incomplete_checkpoint_is_no_reference(tmp_path: Path, change: Any, words: str) -> None:
    source = checkpoint(tmp_path, "dense")
    tensors = read_safetensors(source / "model.safetensors")
    change(tensors)
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(ReferenceUnavailableError, match=words):
        open_reference(source, "float32")


def test_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a", "dense")
    shutil.move(source / "model.safetensors", tmp_path / "model.safetensors")
    index = {"weight_map": {"model.language_model.norm.weight": "../model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ReferenceUnavailableError, match="not a plain name"):
        open_reference(source, "float32")
