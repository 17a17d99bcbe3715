"""Gemma 4's geometry from `config.json`, in both schemas in circulation.

The hub's: `global_head_dim` and `num_global_key_value_heads` (null: as sliding; counted only with
`attention_k_eq_v`) under `text_config`. The one transformers 5.24 writes: `per_layer_config`, an object
from zero-padded layer numbers to the values that differ.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import AttentionKind, ExpertGeometry, LayerGeometry, ModelGeometry
from gemma_neuron.models.config import ConfigReader


def geometry(config: dict[str, Any]) -> ModelGeometry:
    """ModelGeometry of a Gemma 4 text model. Raises ConfigError naming the key."""
    read = ConfigReader(config)
    read.refuse("use_bidirectional_attention", (False, "vision"), "only causal text is ported")
    read.refuse("attention_bias", (False,), "Gemma 4's projections have no bias")
    read.refuse("hidden_activation", ("gelu_pytorch_tanh",), "Gemma's MLP is tanh GELU")
    softcap = read.value("final_logit_softcapping")
    return ModelGeometry(
        family="gemma4",
        vocab=read.integer("vocab_size", 262144),
        hidden=read.integer("hidden_size"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        window=read.integer("sliding_window", 512),
        max_context=read.integer("max_position_embeddings", 131072),
        attention_scale=1.0,
        softcap=None if softcap is None else float(softcap),
        tied=read.tied(),
        layers=_layers(read),
        rope={
            "sliding": read.rope("sliding", 1e4, "rope_local_base_freq"),
            "global": read.rope("global", 1e6, "rope_theta"),
        },
        dtype=read.dtype(),
        per_layer_input=read.integer("hidden_size_per_layer_input", 0, least=0),
        per_layer_vocab=read.integer("vocab_size_per_layer_input", 0, least=0),
        experts=_experts(read),
    )


def _experts(read: ConfigReader) -> ExpertGeometry | None:
    if not read.flag("enable_moe_block", False):
        return None
    return ExpertGeometry(
        experts=read.integer("num_experts"),
        top_k=read.integer("top_k_experts"),
        intermediate=read.integer("moe_intermediate_size"),
    )


def _layers(read: ConfigReader) -> tuple[LayerGeometry, ...]:
    kinds = read.layer_kinds(default_pattern=6)
    own = len(kinds) - read.integer("num_kv_shared_layers", 0, least=0)
    if own < 1:
        raise ConfigError(
            f"config.json: num_kv_shared_layers leaves {own} of {len(kinds)} layers with K/V."
        )
    width = read.integer("intermediate_size")
    double = read.flag("use_double_wide_mlp", False)
    equal = read.flag("attention_k_eq_v", False)
    layers = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = _head_shape(read, index, kind, equal)
        shares = index >= own
        layers.append(
            LayerGeometry(
                index=index,
                kind=kind,
                head_dim=head_dim,
                query_heads=read.integer("num_attention_heads"),
                kv_heads=kv_heads,
                value_is_key=equal and kind == "global",
                intermediate=width * (2 if double and shares else 1),
                kv_donor=_donor(kinds, own, kind) if shares else None,
            )
        )
    return tuple(layers)


def _head_shape(
    read: ConfigReader, index: int, kind: AttentionKind, equal: bool
) -> tuple[int, int]:
    """(head_dim, kv_heads) of one layer, from whichever schema the file has."""
    head_dim = read.integer("head_dim", 256)
    kv_heads = read.integer("num_key_value_heads")
    table = read.value("per_layer_config")
    if table is not None:
        if not isinstance(table, dict) or not all(str(key).isdigit() for key in table):
            raise ConfigError(
                "config.json: per_layer_config must map layer numbers to their values; found keys "
                f"{', '.join(map(str, list(table)[:3]))}."
            )
        mine = next((v for key, v in table.items() if int(key) == index), None) or {}
        return mine.get("head_dim") or head_dim, mine.get("num_key_value_heads") or kv_heads
    if kind == "sliding":
        return head_dim, kv_heads
    global_kv = read.integer("num_global_key_value_heads", kv_heads) if equal else kv_heads
    return read.integer("global_head_dim", head_dim), global_kv


def _donor(kinds: list[AttentionKind], own: int, kind: AttentionKind) -> int:
    """The last layer of the same kind that has its own K/V."""
    for index in range(own - 1, -1, -1):
        if kinds[index] == kind:
            return index
    raise ConfigError(f"config.json: no {kind} layer among the first {own} has K/V to share.")
