"""Gemma 3's geometry from `config.json` (flat `gemma3_text` or nested under `text_config`).

Defaults for keys that hub configs of 4B and larger leave out are those of transformers' Gemma3TextConfig
(5.24), which is how those files are meant to be read.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.geometry import LayerGeometry, ModelGeometry, RopeGeometry
from gemma_neuron.models.config import ConfigReader, check_attention
from gemma_neuron.models.config_rope import OldRopeKeys, read_rope

SLIDING_ROPE = RopeGeometry(kind="default", theta=1e4)
GLOBAL_ROPE = RopeGeometry(kind="default", theta=1e6)


def geometry(config: dict[str, Any]) -> ModelGeometry:
    """ModelGeometry of a Gemma 3 text model. Raises ConfigError naming the key."""
    read = ConfigReader(config)
    read.refuse("attn_logit_softcapping", (0, 0.0), "Gemma 3 has no soft-cap in attention")
    read.refuse("use_bidirectional_attention", (False,), "only causal Gemma 3 is ported")
    read.refuse("attention_bias", (False,), "Gemma 3's projections have no bias")
    read.refuse("hidden_activation", ("gelu_pytorch_tanh",), "Gemma's MLP is tanh GELU")
    read.refuse("per_layer_config", ({},), "Gemma 3's layers all have one shape")
    head_dim = read.integer("head_dim", 256)
    heads = read.integer("num_attention_heads", 8)
    kv_heads = read.integer("num_key_value_heads", 4)
    width = read.integer("intermediate_size", 9216)
    kinds = read.layer_kinds(default_pattern=6)
    check_attention(0, head_dim, heads, kv_heads)
    layers = tuple(
        LayerGeometry(
            index=index,
            kind=kind,
            head_dim=head_dim,
            query_heads=heads,
            kv_heads=kv_heads,
            value_is_key=False,
            intermediate=width,
        )
        for index, kind in enumerate(kinds)
    )
    return ModelGeometry(
        family="gemma3",
        vocab=read.integer("vocab_size", 262208),
        hidden=read.integer("hidden_size", 2304),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        window=read.window(kinds, 4096),
        max_context=read.integer("max_position_embeddings", 131072),
        attention_scale=read.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=read.optional_number("final_logit_softcapping"),
        tied=read.tied(),
        layers=layers,
        rope={
            "sliding": read_rope(
                read, "sliding", SLIDING_ROPE, OldRopeKeys("rope_local_base_freq")
            ),
            "global": read_rope(
                read, "global", GLOBAL_ROPE, OldRopeKeys("rope_theta", "rope_scaling")
            ),
        },
        dtype=read.dtype(),
    )
