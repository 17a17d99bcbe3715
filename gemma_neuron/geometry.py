"""What a Gemma text model is, as frozen numbers: one `LayerGeometry` per decoder layer.

In: nothing (families in `models/` read config.json and build these). Out: values with no torch in
them, cheap to import. Refused: nothing here; `models/*/geometry.py` refuses bad configs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

AttentionKind = Literal["sliding", "global"]
RopeKind = Literal["default", "proportional", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeGeometry:
    """Rotary embedding of one layer kind.

    `factor` divides the frequencies (rope type `linear`, Gemma 3 4B and larger on global layers);
    `rotated_fraction` is the share of head_dim/2 pairs with a real frequency (`proportional`, Gemma 4
    global layers: 0.25 of a 512-wide head is 64 real frequencies, 192 zeros, denominator 512).
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    rotated_fraction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """One decoder layer. Head counts are those of the whole model, not of a rank."""

    index: int
    kind: AttentionKind
    head_dim: int
    query_heads: int
    kv_heads: int
    value_is_key: bool
    """`attention_k_eq_v`: no v_proj; V is the raw k_proj output, before k_norm and rope."""
    intermediate: int
    kv_donor: int | None = None
    """Index of the layer whose K/V this one reads (Gemma 4 E2B/E4B); None: has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGeometry:
    """The sparse branch of each layer (Gemma 4 26B-A4B)."""

    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """A text decoder, down to what its arithmetic depends on."""

    family: str
    """Key of `models.registry`: gemma3 or gemma4."""
    vocab: int
    hidden: int
    norm_eps: float
    window: int
    """Keys a sliding layer sees, the current token counted."""
    max_context: int
    attention_scale: float
    softcap: float | None
    tied: bool
    layers: tuple[LayerGeometry, ...]
    rope: dict[AttentionKind, RopeGeometry]
    dtype: str
    per_layer_input: int = 0
    """Width of the per-layer embeddings (E2B, E4B); 0: none."""
    per_layer_vocab: int = 0
    experts: ExpertGeometry | None = None

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.hidden)

    def layer_of_kind(self, kind: AttentionKind) -> LayerGeometry | None:
        """First layer of that kind: within a kind, head_dim is one."""
        return next((layer for layer in self.layers if layer.kind == kind), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
