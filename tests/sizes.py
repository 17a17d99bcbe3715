"""The real Gemma 4 sizes' config.json, whole or cut to fewer layers: true widths, as the hub publishes them.

In: a size's name. Out: config and generation config as parsed JSON. Source of the numbers: the `config.json` of
google/gemma-4-E2B, -E4B, -12B, -26B-A4B and -31B, text part; 'transformers' 5.24 reads the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.tiny import gemma4_config


@dataclass(frozen=True, slots=True)
class Size:
    """One released size. `every`: each so many layers are global. `text`: what sets it apart."""

    layers: int
    every: int
    text: dict[str, Any]
    shared: int = 0
    unified: bool = False


WIDTHS = {
    "attention_dropout": 0.0,
    "head_dim": 256,
    "global_head_dim": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_cache": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
"""What the sizes have in common; the E models override the last few."""
EDGE = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
}
SIZES = {
    "E2B": Size(
        35,
        5,
        EDGE
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_key_value_heads": 1,
            "use_double_wide_mlp": True,
        },
        shared=20,
    ),
    "E4B": Size(
        42,
        6,
        EDGE | {"hidden_size": 2560, "intermediate_size": 10240, "num_key_value_heads": 2},
        shared=18,
    ),
    "12B": Size(
        48,
        6,
        {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_global_key_value_heads": 1,
            "num_key_value_heads": 8,
        },
        unified=True,
    ),
    "26B-A4B": Size(
        30,
        6,
        {
            "enable_moe_block": True,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_key_value_heads": 8,
            "top_k_experts": 8,
        },
    ),
    "31B": Size(
        60,
        6,
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_key_value_heads": 16,
        },
    ),
}
GENERATION = {
    "bos_token_id": 2,
    "do_sample": True,
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}


def size_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """`config.json` of a size, with `layers` of its layers (all by default) in the same pattern.

    The last layer stays global. Of the E models' layers the same share as in the whole model, in whole
    patterns and at least one, borrows K/V. Raises KeyError for an unknown name.
    """
    size = SIZES[name]
    count = size.layers if layers is None else layers
    kinds = [
        "full_attention" if (i + 1) % size.every == 0 else "sliding_attention" for i in range(count)
    ]
    kinds[-1] = "full_attention"
    shared = size.shared
    if shared and layers is not None:
        patterns = max(1, round(count * shared / size.layers / size.every))
        shared = size.every * patterns
    config = gemma4_config(
        count, **(WIDTHS | size.text | {"layer_types": kinds, "num_kv_shared_layers": shared})
    )
    if size.unified:
        config["architectures"] = ["Gemma4UnifiedForConditionalGeneration"]
        config["model_type"] = "gemma4_unified"
        config["text_config"]["model_type"] = "gemma4_unified_text"
    return config
