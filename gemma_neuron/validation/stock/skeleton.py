"""Stock transformers' causal text model of a checkpoint, without weights, and where each of them is stored.

In: a checkpoint folder in either config schema, nested (text part of a multimodal file) or flat. Out: `Skeleton`.
Refused: a checkpoint that leaves a stock text tensor without a value, has one of another shape, or brings a text
tensor that stock transformers has no use for: such a reference would judge every port wrongly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.errors import ReferenceUnavailableError
from gemma_neuron.validation.stock.tensors import StoredTensors

IMPLEMENTATION = "eager"
"""Of attention and experts: the model file's own lines, no fused kernel."""
STEMS = {
    "gemma3_text": "Gemma3",
    "gemma4_text": "Gemma4",
    "gemma4_unified_text": "Gemma4Unified",
}
SPELLINGS = (
    (re.compile(r"^(model\.language_model|language_model\.model)\."), "model."),
    (re.compile(r"^(language_model|model)\.lm_head\."), "lm_head."),
)
"""Checkpoint spelling → that of the stock causal text model."""
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
LAYERS = "model.layers."


@dataclass(frozen=True, slots=True)
class Skeleton:
    """`model`: stock causal LM whose parameters and buffers are on the meta device.

    `names`: every stock parameter and persistent buffer → its name in `stored`; a tied head is not among them.
    """

    model: Any
    stored: StoredTensors
    names: dict[str, str]

    @property
    def head(self) -> str:
        """Stock name of the table that logits are made with."""
        return HEAD if HEAD in self.names else TABLE


def open_skeleton(folder: Path) -> Skeleton:
    """Build the stock model of `folder` on the meta device and find its tensors."""
    import torch

    model_class, config = stock_class(folder)
    config._attn_implementation = config._experts_implementation = IMPLEMENTATION
    with torch.device("meta"):
        model = model_class(config)
    model.eval().requires_grad_(False)
    stored = StoredTensors(folder)
    return Skeleton(model, stored, _found(folder, model, stored))


def stock_class(folder: Path) -> tuple[Any, Any]:
    """(model class, text config) of a folder's config.json, nested or flat."""
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = {**(config.get("text_config") or config)}
    kind = str(text.get("model_type") or config.get("model_type"))
    kind = kind if kind.endswith("_text") else f"{kind}_text"
    if kind not in STEMS:
        raise ReferenceUnavailableError(
            f"No stock text model is known for model_type {kind!r}.",
            "The reference covers the families this toolkit ports.",
        )
    for key in ("model_type", "architectures", "quantization_config"):
        text.pop(key, None)
    # Stock's whole model goes by the top of a nested config; its text model alone would go by text_config.
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    config_class = getattr(transformers, f"{STEMS[kind]}TextConfig")
    return getattr(transformers, f"{STEMS[kind]}ForCausalLM"), config_class(**text)


def _found(folder: Path, model: Any, stored: StoredTensors) -> dict[str, str]:
    """Stock name → stored name, complete or refused."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop(HEAD)
    unused = _without_use(model)
    names, strays = {}, []
    for name in stored:
        own = _stock_name(name, wanted)
        if own in wanted:
            names[own] = name
        elif own.startswith(LAYERS) and not own.startswith(unused):
            strays.append(name)
    missing = sorted(wanted.keys() - names.keys())
    reshaped = [name for own, name in names.items() if stored.shape(name) != wanted[own]]
    if problems := [*missing, *sorted(strays), *reshaped]:
        raise ReferenceUnavailableError(
            f"Stock transformers cannot load {folder} whole: {len(missing)} tensors missing, "
            f"{len(strays)} without use, {len(reshaped)} of another shape; first {problems[0]}.",
            "Run `gemma-neuron inspect` on the checkpoint.",
        )
    return names


def _stock_name(name: str, wanted: dict[str, tuple[int, ...]]) -> str:
    for spelling, stock in SPELLINGS:
        name = spelling.sub(stock, name)
    bare = f"model.{name}"  # files of the text model without its head spell no prefix
    return bare if bare in wanted else name


def _without_use(model: Any) -> tuple[str, ...]:
    """Tensors that stock itself leaves out: K/V of layers that borrow them."""
    ignored = getattr(model.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return tuple(f"model.{name}" for name in ignored)
