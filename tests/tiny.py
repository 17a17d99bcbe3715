"""Tiny Gemma checkpoints for every test: real schema, real tokenizer, values that show mistakes.

In: a folder to write into and config values to override. Out: a complete hub-style folder.

Values follow what once hid faults: `layer_scalar` is never 1 (its initial value, which looks like a lost
buffer), q/k norms are small so that attention is not chaotic at Gemma 4's scale of 1.0, and weights
are scaled by their fan-in so that logits stay away from the soft-cap.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.parameters import ParameterSpec
from tests.tiny_tokenizer import write_tokenizer

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype in safetensors' spelling, shape, little-endian bytes."""

GEMMA4_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""
GEMMA3_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def layer_types(layers: int, every: int = 6) -> list[str]:
    """`every`-th layer global, the rest sliding; the last layer is always global, as in Gemma 4."""
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    kinds[-1] = "full_attention"
    return kinds


def gemma4_config(layers: int = 12, **overrides: Any) -> dict[str, Any]:
    """config.json in the hub's schema, with the 31B's proportions in small."""
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 16,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 128,
        "layer_types": layer_types(layers),
        "max_position_embeddings": 1024,
        "model_type": "gemma4_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
    }
    text |= overrides
    outer = text["model_type"].removesuffix("_text")
    stem = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[outer]
    return {
        "architectures": [f"{stem}ForConditionalGeneration"],
        "dtype": text["dtype"],
        "eos_token_id": [1, 106],
        "model_type": outer,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def gemma3_config(layers: int = 7, **overrides: Any) -> dict[str, Any]:
    """config.json of a flat `gemma3_text`, with the 270M's proportions in small."""
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "intermediate_size": 128,
        "layer_types": kinds,
        "max_position_embeddings": 1024,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "vocab_size": 512,
    }
    return config | overrides


def write_tiny_gemma4(folder: Path, *, layers: int = 12, seed: int = 0, **overrides: Any) -> Path:
    """A whole Gemma 4 folder; `overrides` are keys of the text config. Returns `folder`."""
    config = gemma4_config(layers, **overrides)
    vocab = config["text_config"]["vocab_size"]
    tensors = random_tensors(config, "model.language_model.", seed)
    return _write(folder, config, tensors, GEMMA4_TEMPLATE, [1, 106, 50], ("gemma4", vocab))


def write_tiny_gemma3(folder: Path, *, layers: int = 7, seed: int = 0, **overrides: Any) -> Path:
    """A whole Gemma 3 text folder; `overrides` are keys of the config. Returns `folder`."""
    config = gemma3_config(layers, **overrides)
    tensors = random_tensors(config, "model.", seed)
    return _write(
        folder, config, tensors, GEMMA3_TEMPLATE, [1, 106], ("gemma3", config["vocab_size"])
    )


def random_tensors(config: dict[str, Any], prefix: str, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor the config's model must have, under `prefix`, in the config's dtype."""
    geometry = read_geometry(config)
    rng = np.random.default_rng(seed)
    dtype = "F32" if geometry.dtype == "float32" else "BF16"
    one_plus = geometry.family == "gemma3"  # its RMSNorm multiplies by 1 + w
    tensors = {}
    for spec in read_parameter_table(geometry):
        if spec.origin == "checkpoint":
            name = spec.name if spec.name.startswith("lm_head") else prefix + spec.name
            tensors[name] = encode(values_of(spec, rng, one_plus), dtype)
    return tensors


def values_of(
    spec: ParameterSpec, rng: np.random.Generator, one_plus: bool = False
) -> NDArray[np.float32]:
    """Random values of one tensor in the range its kind has in a trained model.

    `one_plus`: the family's RMSNorm multiplies by 1 + w (Gemma 3).
    """
    name, shape = spec.name, spec.shape
    if name.endswith("layer_scalar"):
        # spread as in the 31B (0.03 at one end, 0.99 at the other), never exactly 1
        values = rng.uniform(0.03, 0.95, shape)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        values = rng.uniform(0.1, 0.9, shape) - (1.0 if one_plus else 0.0)
    elif len(shape) == 1:
        values = rng.uniform(0.6, 1.4, shape) - (1.0 if one_plus else 0.0)
    elif "embed_tokens" in name or "lm_head" in name:
        # Gemma 3 has no layer_scalar to shrink the residual: a larger table would only echo its input
        values = rng.normal(0.0, (1.0 if one_plus else 2.0) / shape[-1] ** 0.5, shape)
    else:
        values = rng.normal(0.0, 1.0 / shape[-1] ** 0.5, shape)
    return values.astype(np.float32)


def encode(values: NDArray[np.float32], dtype: str = "BF16") -> Tensor:
    """A tensor's bytes in BF16 (rounded to nearest even), F16 or F32."""
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "F32":
        data = values.tobytes()
    elif dtype == "F16":
        data = values.astype("<f2").tobytes()
    else:
        bits = values.view("<u4")
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return dtype, tuple(values.shape), data


def decode(tensor: Tensor) -> NDArray[np.float32]:
    """The float32 values of an encoded tensor."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        flat = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")
    return flat.reshape(shape).copy()


def safetensors_header(sizes: dict[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """Length and JSON header of a file that holds these (dtype, shape, bytes) in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, count) in sizes.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [start, start + count],
        }
        start += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A well-formed safetensors file, tensors in the order given."""
    sizes = {name: (dtype, shape, len(data)) for name, (dtype, shape, data) in tensors.items()}
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(safetensors_header(sizes) + body)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """What `write_safetensors` wrote; for well-formed files only."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    body = raw[8 + size :]
    return {
        name: (item["dtype"], tuple(item["shape"]), body[slice(*item["data_offsets"])])
        for name, item in header.items()
    }


def write_sharded(folder: Path, tensors: dict[str, Tensor], files: int = 3) -> list[str]:
    """The tensors over several files with an index, as the hub has large checkpoints."""
    names = list(tensors)
    parts = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    weight_map = {name: parts[i * files // len(names)] for i, name in enumerate(names)}
    for part in parts:
        mine = {name: tensors[name] for name in names if weight_map[name] == part}
        write_safetensors(folder / part, mine)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return parts


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    template: str,
    eos: list[int],
    tokenizer: tuple[str, int],
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": 2, "eos_token_id": eos, "pad_token_id": 0, "do_sample": True}
    write_json(folder / "generation_config.json", generation)
    write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder, *tokenizer)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
