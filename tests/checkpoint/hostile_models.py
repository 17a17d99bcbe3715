"""Checkpoints whose files are sound and whose content is not: tensors, values, formats, tokenizer, template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.helpers import TEXT4, Tensors, edit_json, edit_tensors
from tests.checkpoint.hostile_files import NORM, SCALAR, WEIGHTS, Hostile
from tests.tiny import GEMMA3_TEMPLATE, Tensor, decode, encode

TABLE = TEXT4 + "embed_tokens.weight"
UP = TEXT4 + "layers.0.mlp.up_proj.weight"
LORA = TEXT4 + "layers.0.mlp.up_proj.lora_A.default.weight"
KEY5 = TEXT4 + "layers.5.self_attn.k_proj.weight"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def without(name: str) -> Callable[[Path], None]:
    return tensors(lambda t: t.pop(name))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: change(t[name])}))


def added(name: str, like: str) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: t[like]}))


def valued(name: str, value: float, dtype: str = "F32") -> Callable[[Path], None]:
    """One value of a tensor set, in float32 so that it survives."""

    def change(tensor: Tensor) -> Tensor:
        values = decode(tensor)
        values.reshape(-1)[0] = value
        return encode(values, dtype)

    return changed(name, change)


def text_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder, CONFIG, lambda c: c["text_config"].update(values))


def json_of(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder, name, lambda c: c.update(values))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def renamed(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def _lora(t: Tensors) -> None:
    t[LORA] = t[SCALAR]


def _packed(t: Tensors) -> None:
    t[UP.replace("weight", "qweight")] = ("I32", (8, 64), bytes(2048))
    del t[UP]


def _wrong_prefix(t: Tensors) -> None:
    for name in list(t):
        t["transformer." + name] = t.pop(name)


def _vision_stands_in(t: Tensors) -> None:
    t["model.vision_tower.encoder.layers.1.layer_scalar"] = t.pop(SCALAR)


MODELS: dict[str, Hostile] = {
    "lost buffer": Hostile(without(SCALAR), "missing", SCALAR),
    "lost weight": Hostile(without(UP), "missing", UP),
    "lost table": Hostile(without(TABLE), "missing", TABLE),
    "lost donor": Hostile(without(TEXT4 + "layers.4.self_attn.k_norm.weight"), "missing",
                          TEXT4 + "layers.4.self_attn.k_norm.weight", "e2b"),
    "lost per-layer table": Hostile(without(TEXT4 + "embed_tokens_per_layer.weight"), "missing",
                                    TEXT4 + "embed_tokens_per_layer.weight", "e2b"),
    "lost norm of Gemma 3": Hostile(without("model.norm.weight"), "missing", "model.norm.weight", "gemma3"),
    "vision stands in for text": Hostile(tensors(_vision_stands_in), "missing", SCALAR),
    "wrong prefix": Hostile(tensors(_wrong_prefix), "missing", TABLE),
    "surplus tensor": Hostile(added(TEXT4 + "layers.0.surplus", SCALAR), "unexpected", TEXT4 + "layers.0.surplus"),
    "V beside K = V": Hostile(added(KEY5.replace("k_proj", "v_proj"), KEY5), "unexpected",
                              KEY5.replace("k_proj", "v_proj")),
    "one layer too many": Hostile(added(TEXT4 + "layers.6.layer_scalar", SCALAR), "unexpected",
                                  TEXT4 + "layers.6.layer_scalar"),
    "two names for one": Hostile(added("model.layers.1.layer_scalar", SCALAR), "duplicate-tensor",
                                 "model.layers.1.layer_scalar"),
    "transposed": Hostile(changed(UP, lambda t: (t[0], t[1][::-1], t[2])), "shape", UP),
    "sliding heads in a global layer": Hostile(
        changed(KEY5, lambda t: (t[0], (32, 64), t[2][:4096])), "shape", KEY5),
    "config of another width": Hostile(text_config(intermediate_size=64), "shape", UP.replace("up", "gate")),
    "float16 weights": Hostile(changed(UP, lambda t: encode(decode(t), "F16")), "dtype", UP),
    "integer weights": Hostile(changed(NORM, lambda t: ("I16", t[1], t[2])), "dtype", NORM),
    "head that differs": Hostile(
        tensors(lambda t: t.update({"lm_head.weight": encode(-decode(t[TABLE]))})),
        "tied-differs", "lm_head.weight"),
    "head of another shape": Hostile(added("lm_head.weight", NORM), "shape", "lm_head.weight"),
    "buffer not a number": Hostile(valued(SCALAR, np.nan), "non-finite", SCALAR),
    "buffer infinite": Hostile(valued(SCALAR, -np.inf), "non-finite", SCALAR),
    "buffer zero": Hostile(valued(SCALAR, 0.0, "BF16"), "all-zero", SCALAR),
    "one weight not a number": Hostile(valued(UP, np.nan, "BF16"), "non-finite", UP, values=True),
    "one weight infinite": Hostile(valued(UP, np.inf, "BF16"), "non-finite", UP, values=True),
    "adapter config": Hostile(text("adapter_config.json", "{}"), "adapter", "adapter_config.json"),
    "unmerged adapter": Hostile(tensors(_lora), "adapter", LORA),
    "quantised by config": Hostile(
        text_config(quantization_config={"quant_method": "gptq"}), "quantised", CONFIG),
    "quantised by file": Hostile(text("hf_quant_config.json", "{}"), "quantised", "hf_quant_config.json"),
    "quantised by tensors": Hostile(tensors(_packed), "quantised", UP.replace("weight", "qweight")),
    "float8 weights": Hostile(
        changed(UP, lambda t: ("F8_E4M3", t[1], t[2][: len(t[2]) // 2])), "quantised", UP),
    "pickled": Hostile(renamed(WEIGHTS, "pytorch_model.bin"), "unsafe-format", "pytorch_model.bin"),
    "gguf": Hostile(renamed(WEIGHTS, "model.gguf"), "unsafe-format", "model.gguf"),
    "flax": Hostile(renamed(WEIGHTS, "flax_model.msgpack"), "unsafe-format", "flax_model.msgpack"),
    "code in the config": Hostile(json_of(CONFIG, auto_map={"AutoModel": "m.M"}), "unsafe-format", CONFIG),
    "code in the tokenizer": Hostile(
        json_of(TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["t.T", None]}), "unsafe-format", TOKENIZER_CONFIG),
    "no weights": Hostile(lambda folder: (folder / WEIGHTS).unlink(), "index-missing-file", WEIGHTS),
    "no tokenizer": Hostile(lambda folder: (folder / TOKENIZER).unlink(), "tokenizer-missing", TOKENIZER),
    "tokenizer no JSON": Hostile(text(TOKENIZER, "{"), "tokenizer-missing", TOKENIZER),
    "tokenizer without pieces": Hostile(text(TOKENIZER, "{}"), "tokenizer-missing", TOKENIZER),
    "sentencepiece only": Hostile(renamed(TOKENIZER, "tokenizer.model"), "tokenizer-missing", TOKENIZER),
    "tokenizer config no JSON": Hostile(text(TOKENIZER_CONFIG, "]"), "tokenizer-missing", TOKENIZER_CONFIG),
    "no template": Hostile(lambda folder: (folder / TEMPLATE).unlink(), "template-missing", TEMPLATE),
    "template of 65 KiB": Hostile(text(TEMPLATE, " " * 66_000), "template-unsafe", TEMPLATE),
    "template not UTF-8": Hostile(text(TEMPLATE, b"\xff\xfe"), "template-unsafe", TEMPLATE),
    "template that does not parse": Hostile(text(TEMPLATE, "{% if %}"), "template-unsafe", TEMPLATE),
    "template that breaks out": Hostile(
        text(TEMPLATE, "{{ cycler.__init__.__globals__.os.popen('id').read() }}"), "template-unsafe", TEMPLATE),
    "template that reads files": Hostile(
        text(TEMPLATE, "{% include '/etc/passwd' %}"), "template-unsafe", TEMPLATE),
    "template without end": Hostile(
        text(TEMPLATE, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        "template-unsafe", TEMPLATE),
    "template that drops the words": Hostile(text(TEMPLATE, "<|turn>model\n"), "template-unsafe", TEMPLATE),
    "template of Gemma 3": Hostile(text(TEMPLATE, GEMMA3_TEMPLATE), "token-id-contradiction", TEMPLATE),
    "eos past the table": Hostile(json_of(GENERATION, eos_token_id=[1, 9999]), "token-id-contradiction", GENERATION),
    "eos that is no number": Hostile(
        json_of(GENERATION, eos_token_id=["106", 1]), "token-id-contradiction", GENERATION),
    "bos that differs": Hostile(json_of(GENERATION, bos_token_id=1), "token-id-contradiction", GENERATION),
    "eos piece that is none": Hostile(
        json_of(TOKENIZER_CONFIG, eos_token="</s>"), "token-id-contradiction", TOKENIZER_CONFIG),
    "piece past the table": Hostile(
        lambda folder: edit_json(folder, TOKENIZER, lambda t: t["model"]["vocab"].update(zzz=512)),
        "token-id-contradiction", TOKENIZER),
    "generation config no JSON": Hostile(text(GENERATION, "nonsense"), "token-id-contradiction", GENERATION),
    "chat id in a number's place": Hostile(
        json_of(GENERATION, pad_token_id=-7), "token-id-contradiction", GENERATION),
}  # fmt: skip
