"""Reading values out of `config.json` text, by key, with an error that names the key.

Never through a config class: writing one and reading it back changes the schema (transformers 5.24 drops
`global_head_dim` for `per_layer_config`), and attribute defaults hide what a file does not say. Where a file
leaves a key out, the caller's default is the one transformers' class documents for that key.
"""

from __future__ import annotations

import math
from typing import Any, cast

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import AttentionKind

KIND_OF_LAYER_TYPE: dict[str, AttentionKind] = {
    "sliding_attention": "sliding",
    "full_attention": "global",
}
LAYER_TYPE_OF_KIND = {kind: name for name, kind in KIND_OF_LAYER_TYPE.items()}
MOST_LAYERS = 1024
"""Gemma has at most 62. Without a bound a config of one line asks for any amount of memory."""
LARGEST_INTEGER = 2**31 - 1
OWN_HINT = "Fetch the checkpoint's own config.json."
SAID_TWICE = frozenset(
    "attention_k_eq_v final_logit_softcapping global_head_dim head_dim hidden_activation hidden_size "
    "hidden_size_per_layer_input intermediate_size layer_types max_position_embeddings "
    "num_attention_heads num_global_key_value_heads num_hidden_layers num_key_value_heads "
    "num_kv_shared_layers per_layer_config query_pre_attn_scalar rms_norm_eps rope_parameters "
    "rope_scaling rope_theta sliding_window vocab_size".split()
)
"""Keys of the text part that some tools write at the top of a nested config as well."""


class ConfigReader:
    """The text part of a parsed `config.json`, read by key."""

    def __init__(self, config: dict[str, Any]) -> None:
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise ConfigError(
                f"config.json: text_config is {type(nested).__name__}, not an object.", OWN_HINT
            )
        self.text: dict[str, Any] = nested if nested is not None else config
        self.whole = config
        if nested is not None:
            self._refuse_second_values(nested)

    def _refuse_second_values(self, nested: dict[str, Any]) -> None:
        for key in sorted(SAID_TWICE & self.whole.keys()):
            pair = (self.whole[key], nested.get(key))
            if None not in pair and pair[0] != pair[1]:
                raise ConfigError(
                    f"config.json gives {key} twice: {_short(pair[0])} at its top and "
                    f"{_short(pair[1])} in text_config.",
                    OWN_HINT,
                )

    def value(self, key: str, default: object = None) -> Any:
        """The text part's value of `key`, null counting as absent."""
        found = self.text.get(key)
        return default if found is None else found

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_INTEGER
    ) -> int:
        """An integer from `least` to `most`; ConfigError names the key otherwise."""
        found = self._required(key, default)
        return checked_integer(key, found, least=least, most=most)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number; ConfigError names the key otherwise."""
        return checked_number(key, self._required(key, default))

    def optional_number(self, key: str) -> float | None:
        """As `number`, None where the key is absent or null."""
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key, default)
        if not isinstance(found, bool):
            raise ConfigError(
                f"config.json: {key} is {_short(found)}; true or false is needed.", OWN_HINT
            )
        return found

    def window(self, kinds: list[AttentionKind], default: int) -> int:
        """`sliding_window`. Null is no default here: it says that sliding layers do not slide."""
        if "sliding_window" in self.text and self.text["sliding_window"] is None:
            if "sliding" in kinds:
                raise ConfigError(
                    f"config.json: sliding_window is null, but layer {kinds.index('sliding')} is a "
                    "sliding_attention layer.",
                    OWN_HINT,
                )
            return default
        return self.integer("sliding_window", default)

    def tied(self) -> bool:
        """`tie_word_embeddings` where transformers 5.24 reads it: at the top, also of a nested config.

        The text part's value has no effect there; absent is true; a null is refused, as it is there.
        """
        for part in (self.text, self.whole):
            if not isinstance(part.get("tie_word_embeddings", True), bool):
                raise ConfigError(
                    f"config.json: tie_word_embeddings is {_short(part['tie_word_embeddings'])}; true or false "
                    "is needed.",
                    OWN_HINT,
                )
        return cast(bool, self.whole.get("tie_word_embeddings", True))

    def dtype(self) -> str:
        """`dtype` (or the older `torch_dtype`), text part first; bfloat16 when absent."""
        for part in (self.text, self.whole):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part.get(key), str):
                    return str(part[key])
        return "bfloat16"

    def layer_kinds(self, default_pattern: int) -> list[AttentionKind]:
        """Attention kind per layer: `layer_types`, else every `sliding_window_pattern`-th is global."""
        count = self.integer("num_hidden_layers", most=MOST_LAYERS)
        types = self.value("layer_types")
        if types is None:
            pattern = self.integer("sliding_window_pattern", default_pattern)
            return ["sliding" if (i + 1) % pattern else "global" for i in range(count)]
        if not isinstance(types, list):
            raise ConfigError(f"config.json: layer_types is {_short(types)}, not a list.", OWN_HINT)
        unknown = sorted({_short(name) for name in types if not _is_layer_type(name)})
        if unknown or len(types) != count:
            raise ConfigError(
                f"config.json: layer_types has {len(types)} entries for {count} layers"
                + (f" and unknown kinds {', '.join(unknown[:5])}." if unknown else "."),
                "Each entry must be sliding_attention or full_attention.",
            )
        return [KIND_OF_LAYER_TYPE[name] for name in types]

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """ConfigError when `key` has a value this toolkit's arithmetic does not cover."""
        found = self.value(key)
        if found is not None and found not in allowed:
            raise ConfigError(
                f"config.json: {key} is {_short(found)}; {why}.",
                "A changed architecture is not ported: use a checkpoint of a released Gemma.",
            )

    def _required(self, key: str, default: object) -> object:
        found = self.value(key, default)
        if found is None:
            raise ConfigError(f"config.json lacks {key}.", OWN_HINT)
        return found


def checked_integer(
    name: str, found: object, *, least: int = 1, most: int = LARGEST_INTEGER
) -> int:
    """`found` if it is an integer from `least` to `most`; ConfigError names it otherwise."""
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise ConfigError(
            f"config.json: {name} is {_short(found)}; an integer from {least} to {most} is needed.",
            OWN_HINT,
        )
    return found


def checked_number(name: str, found: object) -> float:
    """`found` as a float if it is a positive, finite number; ConfigError names it otherwise."""
    good = isinstance(found, int | float) and not isinstance(found, bool)
    # An integer of hundreds of digits is more than a float holds; JSON's 1e999 is read as infinity.
    if not good or not 0 < cast(float, found) <= 1e300 or not math.isfinite(cast(float, found)):
        raise ConfigError(
            f"config.json: {name} is {_short(found)}; a positive number is needed.", OWN_HINT
        )
    return float(cast(float, found))


def check_attention(layer: int, head_dim: int, query_heads: int, kv_heads: int) -> None:
    """Numbers that no attention can have; ConfigError names the layer and both."""
    if head_dim % 2:
        raise ConfigError(
            f"config.json: head_dim {head_dim} of layer {layer} is odd; rotary embedding turns pairs.",
            OWN_HINT,
        )
    if query_heads % kv_heads:
        raise ConfigError(
            f"config.json: layer {layer} has {query_heads} query heads for {kv_heads} KV heads; each KV head "
            "must serve as many.",
            OWN_HINT,
        )


def _is_layer_type(name: object) -> bool:
    return isinstance(name, str) and name in KIND_OF_LAYER_TYPE


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
