"""The real Gemma 4 sizes' config.json, whole or cut to fewer layers: true widths, as the hub publishes them.

In: a size's name. Out: config and generation config as parsed JSON, from the facts of `models/sizes.py`, completed
with the keys that a hub file has and a geometry does not need.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.models.sizes import size_names, size_text
from tests.tiny import gemma4_config

SIZES = size_names()
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
    text = size_text(name)
    every, whole = text.pop("sliding_window_pattern"), text.pop("num_hidden_layers")
    count = whole if layers is None else layers
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)
    ]
    kinds[-1] = "full_attention"
    shared = text.get("num_kv_shared_layers", 0)
    if shared and layers is not None:
        patterns = max(1, round(count * shared / whole / every))
        shared = every * patterns
    made = {"layer_types": kinds, "num_kv_shared_layers": shared}
    extra = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    return gemma4_config(count, **(text | extra | made))
