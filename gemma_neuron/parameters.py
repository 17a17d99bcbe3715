"""The tensors a model must have, and along what each may be cut.

In: nothing. Out: `ParameterTable`, built by `models/<family>/weights.py` from a geometry. Names are
ours: the hub's name without the prefix of the text model (`layers.0.self_attn.q_proj.weight`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Origin = Literal["checkpoint", "derived"]


class Cut(StrEnum):
    """What a parameter's axis counts; the planner turns it into a placement per rank."""

    WHOLE = "whole"
    """On every rank: norms, `layer_scalar`, routers, rotary frequencies."""
    QUERY_ROWS = "query-rows"
    """Rows are query heads (q_proj)."""
    KV_ROWS = "kv-rows"
    """Rows are KV heads (k_proj, v_proj)."""
    QUERY_COLUMNS = "query-columns"
    """Columns are query heads (o_proj)."""
    WIDTH_ROWS = "width-rows"
    """Rows are the MLP's width (gate_proj, up_proj)."""
    WIDTH_COLUMNS = "width-columns"
    """Columns are the MLP's width (down_proj)."""
    VOCAB_ROWS = "vocab-rows"
    """Rows are tokens (embedding tables, lm_head)."""
    EXPERT_GATE_UP = "expert-gate-up"
    """[experts, 2 * width, hidden]: gate and up stacked, each cut by width on every expert."""
    EXPERT_DOWN = "expert-down"
    """[experts, hidden, width]: columns are the experts' width."""
    RANK = "rank"
    """The rank's own number, written by the sharder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor of the model, whole. `layer` is the decoder layer it belongs to, if any."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    layer: int | None = None
    buffer: bool = False
    """Registered as a buffer in stock transformers: what loaders that walk parameters lose."""
    origin: Origin = "checkpoint"
    dtype: str | None = None
    """Fixed dtype (derived tensors); None: the checkpoint's."""


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Every tensor of one model in a fixed order, and how checkpoint names map to it.

    `prefixes`: what may stand before a text tensor's name in a checkpoint; first match wins.
    `tied`: checkpoint names that repeat another tensor (name → the one it must equal).
    `optional`: names a checkpoint may carry or leave out (K/V of layers that borrow them), unused.
    `skipped`: named rules for tensors that are not of the text model: rule → name prefixes.
    """

    specs: tuple[ParameterSpec, ...]
    prefixes: tuple[str, ...]
    tied: dict[str, str]
    optional: frozenset[str]
    skipped: Mapping[str, tuple[str, ...]]

    def __iter__(self) -> Iterator[ParameterSpec]:
        return iter(self.specs)

    def by_name(self) -> dict[str, ParameterSpec]:
        return {spec.name: spec for spec in self.specs}

    def local_name(self, checkpoint_name: str) -> str | None:
        """Our name of a checkpoint's tensor, or None when no text prefix matches."""
        for prefix in self.prefixes:
            if checkpoint_name.startswith(prefix):
                return checkpoint_name[len(prefix) :]
        return None

    def skip_rule(self, checkpoint_name: str) -> str | None:
        """The named rule by which a tensor is left out on purpose, or None."""
        for rule, starts in self.skipped.items():
            if checkpoint_name.startswith(starts):
                return rule
        return None
