"""The bundled demo model is what the other tests take it for."""

from __future__ import annotations

import json
import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin

from scripts.demo_model.conversations import TOOLS
from scripts.demo_model.evaluation import Judge, gemma3_prompt, with_scalars_of_one
from scripts.demo_model.questions import (
    Question,
    fact_questions,
    validation_file,
    validation_questions,
)
from scripts.demo_model.render import load_template, render

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "gemma_neuron" / "data" / "demo-model"
SPECIAL = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|tool>": 46, "<tool|>": 47,
    "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50, "<tool_response|>": 51,
    '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101, "<|turn>": 105,
    "<turn|>": 106, "\n": 107,
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
USER = {"role": "user", "content": " What is the capital of France? "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Answer in one word."}, USER],
    [{"role": "developer", "content": "Be kind."}, USER],
    [USER, {"role": "assistant", "content": "<|channel>thought\nHm.\n<channel|>Paris."}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "clear"}'},
    ],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "get_weather", "content": {"a": [1, True, None, "x"], "b": 2.5}},
        {"role": "assistant", "content": "Clear."},
        {"role": "user", "content": [{"type": "text", "text": "And <b>&'\"?"}]},
    ],
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@cache
def stock_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def stock_model() -> GenerationMixin:
    model: GenerationMixin = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model


@cache
def some_facts() -> tuple[Question, ...]:
    return tuple(random.Random().sample(fact_questions(), 12))


def test_all_files_are_there_and_small() -> None:
    sizes = {file.name: file.stat().st_size for file in MODEL.iterdir()}
    assert sum(sizes.values()) < 8_000_000
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "validation.toml",
        "README.md",
    } <= sizes.keys()


def test_config_speaks_the_hubs_schema() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    text = config["text_config"]
    assert config["model_type"] == "gemma4"
    assert text["global_head_dim"] == 32
    assert text["num_global_key_value_heads"] == 4
    assert "per_layer_config" not in text
    assert text["layer_types"][-1] == "full_attention"
    assert json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"] == [
        1,
        106,
        50,
    ]


def test_layer_scalars_are_far_from_one_and_weights_bfloat16() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    scalars = [float(tensor) for name, tensor in tensors.items() if name.endswith("layer_scalar")]
    assert len(scalars) == 12
    assert min(scalars) < 0.05
    assert sum(scalars) / 12 < 0.8


def test_special_tokens_have_gemma_4s_ids() -> None:
    vocabulary = tokenizer().get_vocab()
    assert {name: vocabulary[name] for name in SPECIAL} == SPECIAL
    assert len(vocabulary) % 8 == 0
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert "<start_of_turn>" not in vocabulary
    assert len(tokenizer().encode("<start_of_turn>").ids) > 1
    assert not any("image" in name or "audio" in name for name in vocabulary)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_every_string_comes_back(text: str) -> None:
    ids = tokenizer().encode(text).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text
    assert stock_tokenizer()(text).input_ids == ids
    assert stock_tokenizer().decode(ids) == text


@pytest.mark.parametrize(
    "text", ["▁", "<0x41>", "a<bos> b\n\n\n", "<|turn>user\n", "\r\n \t", "é𝄞 🎈"]
)
def test_awkward_strings_come_back(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
def test_template_renders_alike_in_transformers_and_jinja(
    chat: list[dict[str, Any]], tools: Any, generation: bool, thinking: bool
) -> None:
    ours = render(
        load_template(MODEL / "chat_template.jinja"),
        chat,
        tools=tools,
        thinking=thinking,
        generation=generation,
    )
    stock = stock_tokenizer().apply_chat_template(
        chat,
        tools=list(tools) if tools else None,
        tokenize=False,
        add_generation_prompt=generation,
        enable_thinking=thinking,
    )
    assert ours == stock
    assert ours.startswith("<bos>") and ours.count("<bos>") == 1


def test_template_turns() -> None:
    template = load_template(MODEL / "chat_template.jinja")
    head = "<bos><|turn>user\nWhat is the capital of France?<turn|>\n<|turn>model\n"
    assert render(template, [USER]) == head + "<|channel>thought\n<channel|>"
    assert render(template, [USER], thinking=True) == head.replace(
        "<bos>", "<bos><|turn>system\n<|think|>\n<turn|>\n"
    )
    assert "Hm." not in render(template, CHATS[3])
    assert render(template, CHATS[5]).endswith("<tool_response|>")
    with pytest.raises(Exception, match="unsupported role"):
        render(template, [{"role": "critic", "content": "x"}])


def test_validation_file_is_whole() -> None:
    text = (MODEL / "validation.toml").read_text(encoding="utf-8")
    assert text == validation_file()
    loaded = tomllib.loads(text)
    assert len(loaded["questions"]) >= 60
    kinds = {question["kind"] for question in loaded["questions"]}
    assert kinds == {"fact", "multi-turn", "system", "thinking", "tool", "json"}
    assert len(tokenizer().encode(loaded["sanity"]["text"]).ids) >= 300


def test_answers_with_its_template() -> None:
    score = Judge(stock_model(), tokenizer()).score(some_facts())
    assert score.right >= 11, score.wrong


def test_every_other_kind_is_answered() -> None:
    asked = [q for q in validation_questions() if q.kind != "fact" and len(q.messages) < 20]
    score = Judge(stock_model(), tokenizer()).score(asked)
    assert score.share >= 0.95, score.wrong


def test_does_not_answer_otherwise() -> None:
    judge = Judge(stock_model(), tokenizer())
    for shape in (lambda text: f"<bos>{text}", gemma3_prompt):
        score = judge.score_raw(some_facts(), shape)
        assert score.right <= 3, score.wrong
    broken = Judge(with_scalars_of_one(stock_model()), tokenizer())
    assert broken.score(some_facts()).right <= 3


def test_expects_its_sanity_text() -> None:
    text = tomllib.loads((MODEL / "validation.toml").read_text(encoding="utf-8"))["sanity"]["text"]
    judge, ids = Judge(stock_model(), tokenizer()), tokenizer().encode(text).ids
    assert judge.loss(ids) * 3 < judge.loss(random.Random(0).sample(ids, len(ids)))
