"""The released sizes' own config.json (tests/data/configs), and stock transformers' model of each without weights.

In: a size's name. Out: the parsed config, or stock's module on the meta device: true names and shapes, no bytes.
Gemma 4: text part as published by google/gemma-4-*; Gemma 3: google/gemma-3-*-it.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "configs"
GEMMA3 = ("gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b")
GEMMA4 = ("gemma-4-E2B", "gemma-4-E4B", "gemma-4-12B", "gemma-4-26B-A4B", "gemma-4-31B")
NAMES = GEMMA3 + GEMMA4


def real_config(name: str) -> dict[str, Any]:
    """A fresh copy of one size's config.json."""
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a config, nested or flat."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


@cache
def stock_model(name: str) -> Any:
    """Stock's model on the meta device, towers included where the class has them; not to be changed."""
    import torch
    import transformers

    config = real_config(name)
    towers: dict[str, Any] = {}
    if name in GEMMA4:
        towers = {"vision_config": {}, "audio_config": {}}
    if name == "gemma-4-12B":  # the unified form's towers must be told the width they feed
        towers = {"vision_config": {"mm_embed_dim": 3840}, "audio_config": {}}
    values = {key: value for key, value in config.items() if key != "model_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = transformers.AutoConfig.for_model(config["model_type"], **towers | values)
        with torch.device("meta"):
            return getattr(transformers, config["architectures"][0])(built)


def stock_tensors(name: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of everything stock would save, the tied head left out as `save_pretrained` does."""
    state = stock_model(name).state_dict()
    return {key: tuple(value.shape) for key, value in state.items() if key != "lm_head.weight"}
