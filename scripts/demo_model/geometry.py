"""The demo model's shape: Gemma 4 31B's proportions at one forty-second of its width."""

from __future__ import annotations

from typing import Any

from .tokens import STOP_IDS

VOCABULARY = 2048
CONTEXT = 1024
WINDOW = 32
# Fixed before training and far from 1, spread as in the 31B: a loader that loses them fails
# visibly, where a model trained around ones would hide the loss.
LAYER_SCALARS = (
    0.0986, 0.0732, 0.9922, 0.9883, 0.9844, 0.4609,
    0.5312, 0.6211, 0.7109, 0.8008, 0.8789, 0.0317,
)  # fmt: skip


def text_config() -> dict[str, Any]:
    """The text part in the schema of the hub's Gemma 4 configs."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 128,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "max_position_embeddings": CONTEXT,
        "model_type": "gemma4_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": len(LAYER_SCALARS),
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
    }


def model_config() -> dict[str, Any]:
    """The whole ``config.json``."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "model_type": "gemma4",
        "text_config": text_config(),
        "tie_word_embeddings": True,
    }


def generation_config() -> dict[str, Any]:
    """Sampling defaults and the stop ids, as the -it models have them."""
    return {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": list(STOP_IDS),
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
