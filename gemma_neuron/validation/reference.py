"""The independent reference: stock transformers on cpu, never this project's model code.

In: a checkpoint folder in either config schema, nested (text part of a multimodal file) or flat.
Out: `Reference`, which gives logits of texts and greedy continuations. Refused: a checkpoint that leaves a
text tensor without a value, or brings one that stock transformers has no use for.

The whole model is in memory; `open_reference` is the one place to change for one layer at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gemma_neuron.errors import ReferenceUnavailableError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ATTENTION = "eager"
SLICE = 64
"""Positions per vocabulary product: 64 rows of 262,144 float32 logits are 64 MiB."""
TEXT_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Checkpoint spelling → that of the stock causal text model."""


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy step: the likeliest tokens [k] and their float32 logits [k], best first."""

    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]

    @property
    def token(self) -> int:
        return int(self.top_ids[0])


class Reference(Protocol):
    """What a golden is made with."""

    vocab: int
    producer: dict[str, str]

    def logits(self, ids: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(start, float32 logits [n, vocab]) slices of one text, positions from 0."""
        ...

    def greedy(self, ids: Sequence[int], keep: int) -> Iterator[Step]:
        """Greedy steps after a prompt, without end; `keep` likeliest tokens of each."""
        ...


def open_reference(folder: Path, dtype: str) -> Reference:
    """The stock model of a checkpoint folder at `dtype` (float32 or bfloat16)."""
    return _WholeModel(folder, dtype)


class _WholeModel:
    """Stock causal LM, wholly in memory."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = _load(folder, getattr(torch, dtype))
        self.vocab = int(self._model.config.vocab_size)
        self.producer = {
            "producer": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "class": type(self._model).__name__,
            "attention": ATTENTION,
            "dtype": dtype,
            "device": "cpu",
        }

    def logits(self, ids: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        torch, model = self._torch, self._model
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            cap = model.config.final_logit_softcapping
            for start in range(0, len(ids), SLICE):
                rows = model.lm_head(hidden[start : start + SLICE])
                if cap is not None:  # as the stock forward does after its head, in its dtype
                    rows = torch.tanh(rows / cap) * cap
                yield start, rows.float().numpy()

    def greedy(self, ids: Sequence[int], keep: int) -> Iterator[Step]:
        import numpy as np

        torch = self._torch
        tokens, cache = torch.tensor([list(ids)]), None
        while True:
            with torch.inference_mode(), _one_thread():
                out = self._model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
                values, top = out.logits[0, -1].float().topk(keep)
            cache = out.cache
            # topk does not say which of two equal logits comes first; argmax takes the lower id.
            order = np.lexsort((top.numpy(), -values.numpy()))
            step = Step(top.numpy()[order].astype(np.int32), values.numpy()[order])
            yield step
            tokens = torch.tensor([[step.token]])


@contextmanager
def _one_thread() -> Iterator[None]:
    """One token's work is too small to share: on a busy two-core machine a step of 270M took 0.80 s with two
    threads, which wait for one another at every product, and 0.15 s with one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(folder: Path, dtype: Any) -> Any:
    from transformers.utils import logging

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_class, text_config = _stock_class(config)
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            key_mapping=TEXT_NAMES,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
    finally:
        if bar:
            logging.enable_progress_bar()
    _refuse_strays(folder, info)
    return model.eval()


def _stock_class(config: dict[str, Any]) -> tuple[Any, Any]:
    """(model class, text config) of a parsed config.json, nested or flat."""
    import transformers

    text = {**(config.get("text_config") or config)}
    kind = str(text.get("model_type") or config.get("model_type"))
    kind = kind if kind.endswith("_text") else f"{kind}_text"
    stem = {
        "gemma3_text": "Gemma3",
        "gemma4_text": "Gemma4",
        "gemma4_unified_text": "Gemma4Unified",
    }
    if kind not in stem:
        raise ReferenceUnavailableError(
            f"No stock text model is known for model_type {kind!r}.",
            "The reference covers the families this toolkit ports.",
        )
    for key in ("model_type", "architectures", "quantization_config"):
        text.pop(key, None)
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    config_class = getattr(transformers, f"{stem[kind]}TextConfig")
    return getattr(transformers, f"{stem[kind]}ForCausalLM"), config_class(**text)


def _refuse_strays(folder: Path, info: dict[str, Any]) -> None:
    """A reference with a tensor left at its initial value would judge every port wrongly."""
    missing = sorted(info["missing_keys"])
    strays = sorted(k for k in info["unexpected_keys"] if k.startswith(("model.layers", "lm_head")))
    problems = [*missing, *strays, *map(str, info["mismatched_keys"])]
    if problems:
        raise ReferenceUnavailableError(
            f"Stock transformers cannot load {folder} whole: {len(missing)} tensors missing, "
            f"{len(strays)} without use, {len(info['mismatched_keys'])} of another shape; "
            f"first {problems[0]}.",
            "Run `gemma-neuron inspect` on the checkpoint.",
        )
