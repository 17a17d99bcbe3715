"""Gemma 3's geometry from `config.json` (flat `gemma3_text` or nested under `text_config`).

Defaults for keys that hub configs of 4B and larger leave out are those of transformers' Gemma3TextConfig
(5.24), which is how those files are meant to be read.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.models.config import ConfigReader


def geometry(config: dict[str, Any]) -> ModelGeometry:
    """ModelGeometry of a Gemma 3 text model. Raises ConfigError naming the key."""
    read = ConfigReader(config)
    read.refuse("attn_logit_softcapping", (0, 0.0), "Gemma 3 has no soft-cap in attention")
    read.refuse("use_bidirectional_attention", (False,), "only causal Gemma 3 is ported")
    read.refuse("attention_bias", (False,), "Gemma 3's projections have no bias")
    read.refuse("hidden_activation", ("gelu_pytorch_tanh",), "Gemma's MLP is tanh GELU")
    head_dim = read.integer("head_dim", 256)
    heads = read.integer("num_attention_heads", 8)
    kv_heads = read.integer("num_key_value_heads", 4)
    width = read.integer("intermediate_size", 9216)
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
        for index, kind in enumerate(read.layer_kinds(default_pattern=6))
    )
    softcap = read.value("final_logit_softcapping")
    return ModelGeometry(
        family="gemma3",
        vocab=read.integer("vocab_size", 262208),
        hidden=read.integer("hidden_size", 2304),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        window=read.integer("sliding_window", 4096),
        max_context=read.integer("max_position_embeddings", 131072),
        attention_scale=read.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=None if softcap is None else float(softcap),
        tied=read.tied(),
        layers=layers,
        rope={
            "sliding": read.rope("sliding", 1e4, "rope_local_base_freq"),
            "global": read.rope("global", 1e6, "rope_theta"),
        },
        dtype=read.dtype(),
    )
