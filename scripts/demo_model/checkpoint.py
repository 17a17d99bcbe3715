"""Writing the model folder: everything a reader of a Hugging Face checkpoint expects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from .geometry import generation_config, model_config
from .render import TEMPLATE_FILE
from .tokens import write_tokenizer

README = """# The bundled demo model

A Gemma-4-shaped chat model of our own: about three million parameters, random at first, trained
by `scripts/train-demo-model` on text written for it. It knows a few hundred short facts, follows
a few system instructions, thinks in one sentence, calls two tools and answers in small JSON
objects. It exists to show and test the toolkit, not to be clever.

Weights, tokenizer, template and texts: Apache-2.0, like the rest of this repository. The
architecture and the special tokens are Gemma 4's; no weights or text of Gemma are in here.
`validation.toml` holds its questions and the text it was trained to find likely.
"""


def hub_name(name: str) -> str:
    """The name a tensor has in Gemma 4's checkpoints: text under ``model.language_model``."""
    return "model.language_model." + name.removeprefix("model.")


def tensors_of(model: Gemma4ForCausalLM) -> dict[str, Tensor]:
    """All parameters and persistent buffers in bfloat16; the tied table once."""
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    return {hub_name(k): v.detach().to(torch.bfloat16).contiguous() for k, v in state.items()}


def _write_json(value: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(
    model: Gemma4ForCausalLM, tokenizer: Tokenizer, validation: str, folder: Path
) -> None:
    """Write beside and swap in, so that a reader never meets half a model."""
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(tensors_of(model), beside / "model.safetensors", metadata={"format": "pt"})
    (beside / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    _write_json(model_config(), beside / "config.json")
    _write_json(generation_config(), beside / "generation_config.json")
    write_tokenizer(tokenizer, beside)
    shutil.copyfile(TEMPLATE_FILE, beside / "chat_template.jinja")
    (beside / "validation.toml").write_text(validation, encoding="utf-8")
    (beside / "README.md").write_text(README, encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    beside.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_stock(folder: Path, dtype: torch.dtype = torch.float32) -> Gemma4ForCausalLM:
    """The stock text model from a written folder, by the public route."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    model: Gemma4ForCausalLM = Gemma4ForCausalLM.from_pretrained(
        folder,
        config=Gemma4TextConfig(**text),
        dtype=dtype,
        key_mapping={r"^model\.language_model\.": "model."},
    )
    model.eval()
    return model
