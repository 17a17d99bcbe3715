"""What stock transformers itself writes is explained to the last tensor (load-04).

Multimodal classes have towers whose names differ by size, and transformers 5.24 writes the config in another
schema than the hub's (`per_layer_config`); both are read from real saves here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel
from transformers.models.gemma3 import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)
from transformers.models.gemma4 import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)
from transformers.models.gemma4_unified import (
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)

from tests.checkpoint.helpers import inspect, of_kind
from tests.tiny import gemma3_config, gemma4_config, layer_types
from tests.tiny_tokenizer import write_tokenizer

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
E2B: dict[str, Any] = {
    "layer_types": layer_types(10, 5), "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True, "attention_k_eq_v": False, "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
}  # fmt: skip
MOE: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip


def text4(layers: int = 6, **overrides: Any) -> dict[str, Any]:
    config: dict[str, Any] = gemma4_config(layers, **overrides)["text_config"]
    return config


def multimodal4(layers: int = 6, **overrides: Any) -> PreTrainedModel:
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 16}
    text = text4(layers, **overrides)
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=AUDIO)
    return Gemma4ForConditionalGeneration(config)


def unified4() -> PreTrainedModel:
    text = text4() | {"model_type": "gemma4_unified_text"}
    config = Gemma4UnifiedConfig(
        text_config=text,
        vision_config={"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        audio_config={"audio_embed_dim": 16},
    )
    return Gemma4UnifiedForConditionalGeneration(config)


def multimodal3() -> PreTrainedModel:
    vision = VISION | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    config = Gemma3Config(text_config=gemma3_config(), vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


SAVES: dict[str, tuple[Callable[[], PreTrainedModel], set[str]]] = {
    "Gemma 4 text": (lambda: Gemma4ForCausalLM(Gemma4TextConfig(**text4())), set()),
    "Gemma 4 as the 31B": (multimodal4, {"vision", "audio"}),
    "Gemma 4 as E2B": (lambda: multimodal4(10, **E2B), {"vision", "audio"}),
    "Gemma 4 as 26B-A4B": (lambda: multimodal4(2, **MOE), {"vision", "audio"}),
    "Gemma 4 as the 12B": (unified4, {"vision", "audio"}),
    "Gemma 3 text": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**gemma3_config())), set()),
    "Gemma 3 as the 4B": (multimodal3, {"vision"}),
}


@pytest.mark.parametrize("name", SAVES)
def test_load_04_every_tensor_of_a_stock_save_is_explained(tmp_path: Path, name: str) -> None:
    make, rules = SAVES[name]
    make().bfloat16().save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "gemma4" if "4 " in name[:8] else "gemma3", 512)
    report = inspect(tmp_path, need_template=False)
    assert [(f.kind, f.message) for f in report.errors] == []
    assert report.tensors.unexplained == 0
    assert set(report.skipped_by_rule) - {"borrowed-kv"} == rules
    # A model that was never trained has every layer_scalar at one, as a lost buffer would be.
    assert len(of_kind(report, "all-one")) == (1 if "4 " in name[:8] else 0)


def test_both_config_schemas_give_one_geometry(tmp_path: Path) -> None:
    multimodal4().bfloat16().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in written["text_config"]
    by_stock = inspect(tmp_path).geometry
    (tmp_path / "config.json").write_text(json.dumps(gemma4_config(6)))
    assert inspect(tmp_path).geometry == by_stock
