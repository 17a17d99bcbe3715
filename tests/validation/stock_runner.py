"""A Runner backed by stock transformers: keeps each slot's token history and computes it all anew.

For tests of the validator alone: it is right by construction, and each fault is one field of `Faults`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gemma_neuron.backends.base import Scores
from tests.stock import stock_model


@dataclass(frozen=True, kw_only=True)
class Faults:
    """One thing wrong with the port."""

    shift_positions: int = 0
    """Added to every position from 1 on: the gap after BOS is wrong."""
    window: int = 0
    """Added to the window."""
    no_softcap: bool = False
    layer_scalar: float | None = None
    leak: bool = False
    """A prefill at 0 goes on from what the slot held."""
    swap_slots: bool = False
    """Decode reads the other slot's history."""
    corrupt_from: int | None = None
    """Positions from here on get noise."""
    decode_sees: int | None = None
    """Decode sees only so many of the newest tokens."""
    no_per_layer: bool = False
    """Looking up per-layer embeddings gives zeros."""


class StockRunner:
    """Implements `backends.base.Runner`."""

    def __init__(
        self,
        folder: Path,
        *,
        faults: Faults | None = None,
        slots: int = 2,
        max_context: int = 256,
        buckets: tuple[int, ...] = (32, 64),
        dtype: str = "float32",
    ) -> None:
        self._model = stock_model(folder, dtype)
        self._faults = faults or Faults()
        self._break()
        self.vocab = int(self._model.config.vocab_size)
        self.slots, self.max_context, self.prefill_buckets = slots, max_context, buckets
        self.score_length = min(128, max_context)
        self._history: list[list[int]] = [[] for _ in range(slots)]
        self.calls = 0

    def _break(self) -> None:
        config, faults = self._model.config, self._faults
        if faults.no_softcap:
            config.final_logit_softcapping = None
        if faults.window:
            config.sliding_window += faults.window
            for layer in self._model.model.layers:
                if getattr(layer.self_attn, "sliding_window", None) is not None:
                    layer.self_attn.sliding_window += faults.window
        if faults.layer_scalar is not None:
            for layer in self._model.model.layers:
                layer.layer_scalar.fill_(faults.layer_scalar)
        if faults.no_per_layer:
            with torch.no_grad():
                self._model.model.embed_tokens_per_layer.weight.zero_()

    def _logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """All positions' logits [n, vocab]."""
        self.calls += 1
        positions = torch.arange(len(ids))
        positions[1:] += self._faults.shift_positions
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([list(ids)]), position_ids=positions[None], use_cache=False
            )
        logits: NDArray[np.float32] = out.logits[0].float().numpy()
        start = self._faults.corrupt_from
        if start is not None and len(ids) > start:
            noise = np.random.default_rng(0).normal(0, 1, (len(ids) - start, self.vocab))
            logits = logits.copy()
            logits[start:] += noise.astype(np.float32)
        return logits

    def _extend(self, tokens: Sequence[int], slot: int, start: int) -> NDArray[np.float32]:
        kept = self._history[slot] if start or not self._faults.leak else self._history[slot][:2]
        history = kept[:start] if start else (list(kept) if self._faults.leak else [])
        self._history[slot] = [*history, *tokens]
        return self._logits(self._history[slot])[-len(tokens) :]

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> NDArray[np.float32]:
        assert 0 < len(tokens) <= self.prefill_buckets[-1]
        row: NDArray[np.float32] = self._extend(tokens, slot, start)[-1]
        return row

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> NDArray[np.float32]:
        out = np.zeros((self.slots, self.vocab), np.float32)
        for slot in range(self.slots):
            if not active[slot]:
                continue
            self._history[slot] = [*self._history[slot][: positions[slot]], tokens[slot]]
        for slot in range(self.slots):
            if active[slot]:
                source = (slot + 1) % self.slots if self._faults.swap_slots else slot
                history = self._history[source] or self._history[slot]
                if self._faults.decode_sees is not None:
                    history = history[-self._faults.decode_sees :]
                out[slot] = self._logits(history)[-1]
        return out

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], *, slot: int, start: int
    ) -> Scores:
        assert len(tokens) <= self.score_length
        logits = self._extend(tokens, slot, start)
        lse = torch.tensor(logits).logsumexp(-1).numpy()
        aim = logits[np.arange(len(tokens)), list(targets)]
        return Scores(logits, lse, aim - lse)

    def close(self) -> None:
        self._history = []
