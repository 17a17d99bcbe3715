"""Gemma 3's tensors: nothing beyond what every Gemma has; no buffers."""

from __future__ import annotations

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.weights import attention_specs, mlp_specs, shared_specs, table_of
from gemma_neuron.parameters import ParameterTable

SKIPPED = {
    "vision": (
        "vision_tower.",
        "model.vision_tower.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
    ),
}


def parameter_table(g: ModelGeometry) -> ParameterTable:
    """Every tensor of a Gemma 3 text model."""
    specs = list(shared_specs(g))
    for layer in g.layers:
        specs += [*attention_specs(g, layer), *mlp_specs(g, layer)]
    return table_of(g, specs, SKIPPED)
