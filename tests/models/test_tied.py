"""`tie_word_embeddings` at the top of a nested config and in its text part: what stock transformers makes of both."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.errors import ConfigError
from gemma_neuron.models.registry import read_config_notes, read_geometry
from gemma_neuron.validation.stock.skeleton import stock_class
from tests.checkpoint.test_stock_saves import AUDIO, VISION
from tests.tiny import gemma3_config, gemma4_config

KEY, ABSENT = "tie_word_embeddings", "absent"
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": VISION | {"model_type": "siglip_vision_model"}},
    "gemma4": {"vision_config": VISION, "audio_config": AUDIO},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32}, "audio_config": {}},
}


def nested(kind: str, top: object, text: object) -> dict[str, Any]:
    if kind == "gemma3":
        config: dict[str, Any] = {"model_type": kind, "text_config": gemma3_config(2)}
    else:
        config = gemma4_config(2, model_type=f"{kind}_text")
    for part, value in ((config, top), (config["text_config"], text)):
        part.pop(KEY, None)
        if value != ABSENT:
            part[KEY] = value
    return config


def stock_is_tied(config: dict[str, Any]) -> bool:
    import torch
    import transformers

    values = {key: value for key, value in config.items() if key != "model_type"}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        built = transformers.AutoConfig.for_model(
            config["model_type"], **values, **TOWERS[config["model_type"]]
        )
        model = transformers.AutoModelForCausalLM.from_config(built)
    return model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", TOWERS)
def test_the_head_is_tied_where_stock_ties_it(kind: str, tmp_path: Path) -> None:
    """In every combination; the reference follows, and a text part that is overruled is mentioned."""
    seen = set()
    for top, text in itertools.product((ABSENT, True, False), repeat=2):
        config = nested(kind, top, text)
        tied = read_geometry(config).tied
        assert tied == stock_is_tied(config), (top, text)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert stock_class(tmp_path)[1].tie_word_embeddings == tied, (top, text)
        notes = " ".join(read_config_notes(config))
        assert (KEY in notes) == (text not in (ABSENT, tied)), (top, text, notes)
        seen.add(tied)
    assert seen == {True, False}


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(("top", "text"), [(None, True), (True, None), ("yes", True), (1, True)])
def test_neither_true_nor_false_is_refused(kind: str, top: object, text: object) -> None:
    with pytest.raises(ConfigError, match=f"{KEY} is"):
        read_geometry(nested(kind, top, text))
