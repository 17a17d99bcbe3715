"""Reading values out of `config.json` text, by key, with an error that names the key.

Never through a config class: writing one and reading it back changes the schema (transformers 5.24 drops
`global_head_dim` for `per_layer_config`), and attribute defaults hide what a file does not say.
"""

from __future__ import annotations

from typing import Any, cast

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import AttentionKind, RopeGeometry

KIND_OF_LAYER_TYPE: dict[str, AttentionKind] = {
    "sliding_attention": "sliding",
    "full_attention": "global",
}
LAYER_TYPE_OF_KIND = {kind: name for name, kind in KIND_OF_LAYER_TYPE.items()}


class ConfigReader:
    """The text part of a parsed `config.json`, read by key."""

    def __init__(self, config: dict[str, Any]) -> None:
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise ConfigError(
                f"config.json: text_config is {type(nested).__name__}, not an object."
            )
        self.text: dict[str, Any] = nested if nested is not None else config
        self.whole = config

    def value(self, key: str, default: object = None) -> Any:
        """The text part's value of `key`, null counting as absent."""
        found = self.text.get(key)
        return default if found is None else found

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; ConfigError names the key otherwise."""
        found = self.value(key, default)
        if found is None:
            raise ConfigError(
                f"config.json lacks {key}.", "Fetch the checkpoint's own config.json."
            )
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise ConfigError(f"config.json: {key} is {found!r}; an integer >= {least} is needed.")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; ConfigError names the key otherwise."""
        found = self.value(key, default)
        if found is None:
            raise ConfigError(
                f"config.json lacks {key}.", "Fetch the checkpoint's own config.json."
            )
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise ConfigError(f"config.json: {key} is {found!r}; a positive number is needed.")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key, default)
        if not isinstance(found, bool):
            raise ConfigError(f"config.json: {key} is {found!r}; true or false is needed.")
        return found

    def tied(self) -> bool:
        """`tie_word_embeddings` of the text part, else of the whole; Gemma ties by default."""
        for part in (self.text, self.whole):
            if isinstance(part.get("tie_word_embeddings"), bool):
                return cast(bool, part["tie_word_embeddings"])
        return True

    def dtype(self) -> str:
        """`dtype` (or the older `torch_dtype`), text part first; bfloat16 when absent."""
        for part in (self.text, self.whole):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part.get(key), str):
                    return str(part[key])
        return "bfloat16"

    def layer_kinds(self, default_pattern: int) -> list[AttentionKind]:
        """Attention kind per layer: `layer_types`, else every `sliding_window_pattern`-th is global."""
        count = self.integer("num_hidden_layers")
        types = self.value("layer_types")
        if types is None:
            pattern = self.integer("sliding_window_pattern", default_pattern)
            return ["sliding" if (i + 1) % pattern else "global" for i in range(count)]
        unknown = sorted({str(name) for name in types} - set(KIND_OF_LAYER_TYPE))
        if not isinstance(types, list) or unknown or len(types) != count:
            raise ConfigError(
                f"config.json: layer_types has {len(types)} entries for {count} layers"
                + (f" and unknown kinds {', '.join(unknown)}." if unknown else "."),
                "Each entry must be sliding_attention or full_attention.",
            )
        return [KIND_OF_LAYER_TYPE[name] for name in types]

    def rope(self, kind: AttentionKind, default_theta: float, old_key: str) -> RopeGeometry:
        """Rope of one kind: `rope_parameters` per layer type, else the older flat keys."""
        table = self.value("rope_parameters", {})
        entry = table.get(LAYER_TYPE_OF_KIND[kind]) or {}
        if not entry and kind == "global":
            entry = self.value("rope_scaling", {})
        name = entry.get("rope_type", entry.get("type", "default"))
        if name not in ("default", "linear", "proportional"):
            raise ConfigError(
                f"config.json: rope_type {name!r} of {kind} layers is not one of default, linear, "
                "proportional.",
                "This toolkit ports the rotary forms Gemma 3 and 4 ship with.",
            )
        return RopeGeometry(
            kind=name,
            theta=float(entry.get("rope_theta") or self.value(old_key, default_theta)),
            factor=float(entry.get("factor", 1.0)),
            rotated_fraction=float(entry.get("partial_rotary_factor", 1.0)),
        )

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """ConfigError when `key` has a value this toolkit's arithmetic does not cover."""
        found = self.value(key)
        if found is not None and found not in allowed:
            raise ConfigError(f"config.json: {key} is {found!r}; {why}.")
