"""Each released family in small: what sets it apart, over the tiny checkpoints of `tests.tiny`.

In: a family's name, layer types and config overrides. Out: its config.json, or a whole folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny import gemma3_config, gemma4_config, write_tiny_gemma3, write_tiny_gemma4

SLIDING, GLOBAL = "sliding_attention", "full_attention"
E_MODEL: dict[str, Any] = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "E2B": E_MODEL | {"num_key_value_heads": 1, "use_double_wide_mlp": True},
    "E4B": E_MODEL | {"num_key_value_heads": 2},
    "12B": {"model_type": "gemma4_unified_text", "num_global_key_value_heads": 1},
    "26B-A4B": {
        "enable_moe_block": True,
        "moe_intermediate_size": 24,
        "num_attention_heads": 8,
        "num_experts": 8,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "top_k_experts": 2,
    },
    "31B": {},
}
"""Overrides of `gemma3_config` or `gemma4_config`, whose own proportions are the 270M's and the 31B's."""
LAYERS: dict[str, Sequence[str]] = {
    family: [SLIDING, GLOBAL] * (2 if family in ("E2B", "E4B") else 1) for family in FAMILIES
}
"""The fewest layers that show all of a family: one of each kind, and in E2B and E4B one of each that borrows K/V."""


def family_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; layers are those of `overrides` or of `LAYERS`."""
    count, values = _of(family, overrides)
    return (gemma3_config if family == "gemma3" else gemma4_config)(count, **values)


def write_family(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A whole folder with random weights. Returns `folder`."""
    count, values = _of(family, overrides)
    write = write_tiny_gemma3 if family == "gemma3" else write_tiny_gemma4
    return write(folder, layers=count, seed=seed, **values)


def _of(family: str, overrides: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    values = {"layer_types": list(LAYERS[family])} | FAMILIES[family] | overrides
    return len(values["layer_types"]), values
