"""Stock transformers' whole model of a checkpoint folder, loaded the ordinary way: what tests compare with.

The reference of `validation` runs stock layers one at a time; this is the check on it and on every port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gemma_neuron.validation.stock.skeleton import IMPLEMENTATION, stock_class

TEXT_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Checkpoint spelling → that of the causal text model."""


def stock_model(folder: Path, dtype: str = "float32") -> Any:
    """`from_pretrained` of the causal text model; a tensor missing from the folder fails the test."""
    model_class, config = stock_class(folder)
    model, info = model_class.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        key_mapping=TEXT_NAMES,
        attn_implementation=IMPLEMENTATION,
        experts_implementation=IMPLEMENTATION,
        output_loading_info=True,
        local_files_only=True,
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


def stock_logits(
    folder: Path, texts: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[NDArray[np.float32]]:
    """Every position's logits of each text, [n, vocab] each, as float32."""
    model = stock_model(folder, dtype)
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].float().numpy()
            for text in texts
        ]


def stock_greedy(model: Any, ids: Sequence[int], limit: int) -> tuple[list[int], list[float]]:
    """(tokens, their logits) of stock's own generation, one prompt alone, without stopping."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(ids)]),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(ids) :].tolist(), [float(row[0].max()) for row in out.logits]
