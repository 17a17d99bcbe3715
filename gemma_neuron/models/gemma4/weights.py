"""Gemma 4's tensors: `layer_scalar` (a buffer in stock transformers) on every layer, and the tensors
of per-layer embeddings and of the sparse branch where a size has them."""

from __future__ import annotations

from collections.abc import Iterator

from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.models.weights import (
    PER_LAYER_TABLE,
    attention_specs,
    mlp_specs,
    shared_specs,
    table_of,
)
from gemma_neuron.parameters import Cut, ParameterSpec, ParameterTable

SKIPPED = {
    "vision": (
        "model.vision_tower.",
        "model.embed_vision.",
        "model.vision_embedder.",
        "vision_tower.",
        "embed_vision.",
        "vision_embedder.",
    ),
    "audio": ("model.audio_tower.", "model.embed_audio.", "audio_tower.", "embed_audio."),
}


def parameter_table(g: ModelGeometry) -> ParameterTable:
    """Every tensor of a Gemma 4 text model."""
    specs = [*shared_specs(g), *_per_layer_tables(g)]
    for layer in g.layers:
        specs += [*attention_specs(g, layer), *mlp_specs(g, layer), *_layer_specs(g, layer)]
        if g.experts is not None:
            specs += list(_expert_specs(g, layer))
    return table_of(g, specs, SKIPPED, frozenset(_borrowed_kv(g)))


def _layer_specs(g: ModelGeometry, layer: LayerGeometry) -> Iterator[ParameterSpec]:
    base, p = f"layers.{layer.index}", g.per_layer_input
    yield ParameterSpec(
        name=f"{base}.layer_scalar", shape=(1,), cut=Cut.WHOLE, layer=layer.index, buffer=True
    )
    if p:
        for name, shape in (
            ("per_layer_input_gate.weight", (p, g.hidden)),
            ("per_layer_projection.weight", (g.hidden, p)),
            ("post_per_layer_input_norm.weight", (g.hidden,)),
        ):
            yield ParameterSpec(
                name=f"{base}.{name}", shape=shape, cut=Cut.WHOLE, layer=layer.index
            )


def _per_layer_tables(g: ModelGeometry) -> Iterator[ParameterSpec]:
    if not g.per_layer_input:
        return
    packed = len(g.layers) * g.per_layer_input
    yield ParameterSpec(
        name=PER_LAYER_TABLE,
        shape=(g.per_layer_vocab, packed),
        cut=Cut.VOCAB_ROWS,
    )
    yield ParameterSpec(
        name="per_layer_model_projection.weight", shape=(packed, g.hidden), cut=Cut.WHOLE
    )
    yield ParameterSpec(
        name="per_layer_projection_norm.weight", shape=(g.per_layer_input,), cut=Cut.WHOLE
    )


def _expert_specs(g: ModelGeometry, layer: LayerGeometry) -> Iterator[ParameterSpec]:
    assert g.experts is not None
    base, e = f"layers.{layer.index}", g.experts
    for name, shape, cut in (
        ("router.proj.weight", (e.experts, g.hidden), Cut.WHOLE),
        ("router.scale", (g.hidden,), Cut.WHOLE),
        ("router.per_expert_scale", (e.experts,), Cut.WHOLE),
        ("experts.gate_up_proj", (e.experts, 2 * e.intermediate, g.hidden), Cut.EXPERT_GATE_UP),
        ("experts.down_proj", (e.experts, g.hidden, e.intermediate), Cut.EXPERT_DOWN),
        ("post_feedforward_layernorm_1.weight", (g.hidden,), Cut.WHOLE),
        ("post_feedforward_layernorm_2.weight", (g.hidden,), Cut.WHOLE),
        ("pre_feedforward_layernorm_2.weight", (g.hidden,), Cut.WHOLE),
    ):
        yield ParameterSpec(name=f"{base}.{name}", shape=shape, cut=cut, layer=layer.index)


def _borrowed_kv(g: ModelGeometry) -> Iterator[str]:
    """K/V tensors of layers that borrow them: some exports carry them, none uses them."""
    for layer in g.layers:
        if layer.kv_donor is not None:
            for name in ("k_proj", "v_proj", "k_norm"):
                yield f"layers.{layer.index}.self_attn.{name}.weight"
