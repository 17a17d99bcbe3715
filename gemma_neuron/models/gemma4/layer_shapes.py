"""head_dim and KV heads of each Gemma 4 layer, in both schemas of `config.json`.

The hub's: `global_head_dim` (512 where the key is absent) and `num_global_key_value_heads`, null meaning as
sliding layers, and the latter counted only with `attention_k_eq_v`. The one transformers 5.24 writes:
`per_layer_config`, an object from zero-padded layer numbers to the values that differ. Where a file has both,
they must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import AttentionKind
from gemma_neuron.models.config import OWN_HINT, ConfigReader, checked_integer

GLOBAL_HEAD_DIM = 512
"""What transformers takes where a file names neither the key nor a per_layer_config."""
PER_LAYER_KEYS = frozenset({"head_dim", "num_key_value_heads"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    head_dim: int
    kv_heads: int


def layer_shapes(
    read: ConfigReader, kinds: list[AttentionKind], equal: bool
) -> tuple[LayerShape, ...]:
    """One shape a layer. `equal`: attention_k_eq_v. Raises ConfigError naming key and layer."""
    table = read.value("per_layer_config")
    by_hub = _by_hub_keys(read, kinds, equal)
    if table is None:
        return by_hub
    shapes = _by_table(read, table, len(kinds))
    _refuse_contradiction(read, shapes, by_hub, equal)
    for kind in set(kinds):
        mine = {shape for shape, k in zip(shapes, kinds, strict=True) if k == kind}
        if len(mine) > 1:
            found = ", ".join(f"{s.head_dim} x {s.kv_heads}" for s in sorted(mine, key=str))
            raise ConfigError(
                f"config.json: per_layer_config gives {kind} layers different shapes (head_dim x KV heads: "
                f"{found}); Gemma 4's layers of one kind are alike.",
                OWN_HINT,
            )
    return shapes


def _refuse_contradiction(
    read: ConfigReader,
    by_table: tuple[LayerShape, ...],
    by_hub: tuple[LayerShape, ...],
    equal: bool,
) -> None:
    for layer, (a, b) in enumerate(zip(by_table, by_hub, strict=True)):
        for key, said, one, other in (
            ("global_head_dim", True, a.head_dim, b.head_dim),
            ("num_global_key_value_heads", equal, a.kv_heads, b.kv_heads),
        ):
            if said and read.value(key) is not None and one != other:
                raise ConfigError(
                    f"config.json contradicts itself about layer {layer}: per_layer_config gives it {one}, {key} "
                    f"makes it {other}.",
                    OWN_HINT,
                )


def _by_hub_keys(
    read: ConfigReader, kinds: list[AttentionKind], equal: bool
) -> tuple[LayerShape, ...]:
    sliding = LayerShape(read.integer("head_dim", 256), read.integer("num_key_value_heads"))
    # An absent key is read as transformers reads it; a null says that nothing differs.
    absent = sliding.head_dim if "global_head_dim" in read.text else GLOBAL_HEAD_DIM
    wide = LayerShape(
        read.integer("global_head_dim", absent),
        read.integer("num_global_key_value_heads", sliding.kv_heads) if equal else sliding.kv_heads,
    )
    return tuple(sliding if kind == "sliding" else wide for kind in kinds)


def _by_table(read: ConfigReader, table: Any, layers: int) -> tuple[LayerShape, ...]:
    if not isinstance(table, dict) or not all(_is_number(key) for key in table):
        found = ", ".join(map(str, list(table)[:3])) if isinstance(table, dict) else str(table)
        raise ConfigError(
            f"config.json: per_layer_config must map layer numbers to their values; found {found[:80]}.",
            OWN_HINT,
        )
    by_layer: dict[int, dict[str, Any]] = {}
    for key, values in table.items():
        layer = int(key)
        if layer >= layers or layer in by_layer:
            why = "twice" if layer in by_layer else f"of a model with {layers} layers"
            raise ConfigError(f"config.json: per_layer_config names layer {key} {why}.", OWN_HINT)
        by_layer[layer] = _checked(layer, values)
    head_dim, kv_heads = read.integer("head_dim", 256), read.integer("num_key_value_heads")
    return tuple(
        LayerShape(mine.get("head_dim", head_dim), mine.get("num_key_value_heads", kv_heads))
        for mine in (by_layer.get(layer, {}) for layer in range(layers))
    )


def _checked(layer: int, values: Any) -> dict[str, int]:
    """A layer's values, nulls left out; ConfigError for keys that would be ignored here."""
    if not isinstance(values, dict):
        raise ConfigError(f"config.json: per_layer_config of layer {layer} is no object.", OWN_HINT)
    said = {key: value for key, value in values.items() if value not in (None, [])}
    unknown = sorted(said.keys() - PER_LAYER_KEYS)
    if unknown:
        raise ConfigError(
            f"config.json: per_layer_config of layer {layer} sets {', '.join(unknown[:4])[:80]}; this toolkit "
            f"acts on {' and '.join(sorted(PER_LAYER_KEYS))} only.",
            "No released Gemma 4 has such layers.",
        )
    return {key: checked_integer(f"{key} of layer {layer}", value) for key, value in said.items()}


def _is_number(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 6
