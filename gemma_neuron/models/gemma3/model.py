"""Gemma 3's decoder layer: norms multiply by 1 + w, scores are scaled by query_pre_attn_scalar^-0.5."""

from __future__ import annotations

from gemma_neuron.models.layer import SandwichLayer


class Gemma3Layer(SandwichLayer):
    """Nothing beyond what every Gemma layer does; the scale comes with the geometry."""

    norm_offset = 1.0
    value_norm = False


LAYER = Gemma3Layer
