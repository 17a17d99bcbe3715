"""Gemma 4's geometry from `config.json`, in both schemas in circulation (`layer_shapes` reads them).

Defaults for keys a file leaves out are those of transformers' Gemma4TextConfig and Gemma4UnifiedTextConfig
(5.24). The unified form (12B) has neither per-layer embeddings nor experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import (
    AttentionKind,
    ExpertGeometry,
    LayerGeometry,
    ModelGeometry,
    RopeGeometry,
)
from gemma_neuron.models.config import OWN_HINT, ConfigReader, check_attention
from gemma_neuron.models.config_rope import read_rope
from gemma_neuron.models.gemma4.layer_shapes import layer_shapes

SLIDING_ROPE = RopeGeometry(kind="default", theta=1e4)
GLOBAL_ROPE = RopeGeometry(kind="proportional", theta=1e6, rotated_fraction=0.25)


@dataclass(frozen=True, slots=True)
class _Defaults:
    window: int = 512
    max_context: int = 131072
    per_layer_input: int = 256


PLAIN = _Defaults()
UNIFIED = _Defaults(window=1024, max_context=262144, per_layer_input=0)


def geometry(config: dict[str, Any]) -> ModelGeometry:
    """ModelGeometry of a Gemma 4 text model. Raises ConfigError naming the key."""
    read = ConfigReader(config)
    unified = str(config.get("model_type")).startswith("gemma4_unified")
    _refuse_other_arithmetic(read, unified)
    defaults = UNIFIED if unified else PLAIN
    kinds = _kinds(read)
    per_layer_input = read.integer("hidden_size_per_layer_input", defaults.per_layer_input, least=0)
    return ModelGeometry(
        family="gemma4",
        vocab=read.integer("vocab_size", 262144),
        hidden=read.integer("hidden_size"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        window=read.window(kinds, defaults.window),
        max_context=read.integer("max_position_embeddings", defaults.max_context),
        attention_scale=1.0,
        softcap=read.optional_number("final_logit_softcapping"),
        tied=read.tied(),
        layers=_layers(read, kinds),
        rope={
            "sliding": read_rope(read, "sliding", SLIDING_ROPE, None),
            "global": read_rope(read, "global", GLOBAL_ROPE, None),
        },
        dtype=read.dtype(),
        per_layer_input=per_layer_input,
        per_layer_vocab=_per_layer_vocab(read, per_layer_input),
        experts=_experts(read),
    )


def _refuse_other_arithmetic(read: ConfigReader, unified: bool) -> None:
    read.refuse("use_bidirectional_attention", (False, "vision"), "only causal text is ported")
    read.refuse("attention_bias", (False,), "Gemma 4's projections have no bias")
    read.refuse("hidden_activation", ("gelu_pytorch_tanh",), "Gemma's MLP is tanh GELU")
    read.refuse("rope_scaling", ({},), "Gemma 4 takes its rotary form from rope_parameters only")
    if unified:
        why = "the unified form of Gemma 4 has none"
        read.refuse("hidden_size_per_layer_input", (0,), why)
        read.refuse("enable_moe_block", (False,), why)


def _kinds(read: ConfigReader) -> list[AttentionKind]:
    """Attention kinds; the last layer is global, which a pattern alone does not always give."""
    kinds = read.layer_kinds(default_pattern=6)
    if kinds[-1] == "sliding" and read.value("layer_types") is not None:
        raise ConfigError(
            f"config.json: layer_types ends with sliding_attention (layer {len(kinds) - 1}); Gemma 4's last "
            "layer is full_attention, and transformers would change it without an error.",
            OWN_HINT,
        )
    return [*kinds[:-1], "global"]


def _per_layer_vocab(read: ConfigReader, per_layer_input: int) -> int:
    """Rows of the per-layer tables; 0 without any, whatever the key or its default says."""
    rows = read.integer("vocab_size_per_layer_input", 262144, least=0)
    if per_layer_input and not rows:
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input is 0, but hidden_size_per_layer_input is "
            f"{per_layer_input}.",
            OWN_HINT,
        )
    return rows if per_layer_input else 0


def _experts(read: ConfigReader) -> ExpertGeometry | None:
    if not read.flag("enable_moe_block", False):
        return None
    found = ExpertGeometry(
        experts=read.integer("num_experts"),
        top_k=read.integer("top_k_experts"),
        intermediate=read.integer("moe_intermediate_size"),
    )
    if found.top_k > found.experts:
        raise ConfigError(
            f"config.json: top_k_experts {found.top_k} exceeds num_experts {found.experts}.",
            OWN_HINT,
        )
    return found


def _layers(read: ConfigReader, kinds: list[AttentionKind]) -> tuple[LayerGeometry, ...]:
    own = len(kinds) - read.integer("num_kv_shared_layers", 0, least=0)
    if own < 1:
        raise ConfigError(
            f"config.json: num_kv_shared_layers leaves {own} of {len(kinds)} layers with K/V.",
            OWN_HINT,
        )
    width = read.integer("intermediate_size")
    heads = read.integer("num_attention_heads")
    double = read.flag("use_double_wide_mlp", False)
    equal = read.flag("attention_k_eq_v", False)
    layers = []
    for index, shape in enumerate(layer_shapes(read, kinds, equal)):
        kind, shares = kinds[index], index >= own
        check_attention(index, shape.head_dim, heads, shape.kv_heads)
        layers.append(
            LayerGeometry(
                index=index,
                kind=kind,
                head_dim=shape.head_dim,
                query_heads=heads,
                kv_heads=shape.kv_heads,
                value_is_key=equal and kind == "global",
                intermediate=width * (2 if double and shares else 1),
                kv_donor=_donor(kinds, own, kind) if shares else None,
            )
        )
    return tuple(layers)


def _donor(kinds: list[AttentionKind], own: int, kind: AttentionKind) -> int:
    """The last layer of the same kind that has its own K/V."""
    for index in range(own - 1, -1, -1):
        if kinds[index] == kind:
            return index
    raise ConfigError(
        f"config.json: no {kind} layer among the first {own} has K/V to share.", OWN_HINT
    )
