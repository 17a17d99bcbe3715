"""The part of a parameter table that every Gemma shares; families add what is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.parameters import Cut, ParameterSpec, ParameterTable

TABLE = "embed_tokens.weight"
PER_LAYER_TABLE = "embed_tokens_per_layer.weight"
HEAD = "lm_head.weight"
# What stands before a text tensor's name on the hub (transformers 5 writes `model.language_model.`,
# transformers 4 wrote `language_model.model.` for multimodal files, text-only files have `model.`).
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_NAMES = (HEAD, "language_model.lm_head.weight", "model.lm_head.weight")
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def inv_freq_name(kind: str) -> str:
    """Name of a layer kind's rotary frequencies: float32 [head_dim / 2], written by the sharder."""
    return f"rope.{kind}.inv_freq"


def attention_specs(g: ModelGeometry, layer: LayerGeometry) -> Iterator[ParameterSpec]:
    """Projections and q/k norms of one layer."""
    base, d = f"layers.{layer.index}.self_attn", layer.head_dim

    def linear(name: str, shape: tuple[int, int], cut: Cut) -> ParameterSpec:
        return ParameterSpec(name=f"{base}.{name}.weight", shape=shape, cut=cut, layer=layer.index)

    yield linear("q_proj", (layer.query_heads * d, g.hidden), Cut.QUERY_ROWS)
    yield linear("o_proj", (g.hidden, layer.query_heads * d), Cut.QUERY_COLUMNS)
    norms = ["q_norm"]
    if layer.kv_donor is None:
        norms.append("k_norm")
        yield linear("k_proj", (layer.kv_heads * d, g.hidden), Cut.KV_ROWS)
        if not layer.value_is_key:
            yield linear("v_proj", (layer.kv_heads * d, g.hidden), Cut.KV_ROWS)
    for norm in norms:
        yield ParameterSpec(
            name=f"{base}.{norm}.weight", shape=(d,), cut=Cut.WHOLE, layer=layer.index
        )


def mlp_specs(g: ModelGeometry, layer: LayerGeometry) -> Iterator[ParameterSpec]:
    """Gate, up and down projection, and the four norms around attention and MLP."""
    base = f"layers.{layer.index}"
    rows, columns = (layer.intermediate, g.hidden), (g.hidden, layer.intermediate)
    for name, shape, cut in (
        ("gate_proj", rows, Cut.WIDTH_ROWS),
        ("up_proj", rows, Cut.WIDTH_ROWS),
        ("down_proj", columns, Cut.WIDTH_COLUMNS),
    ):
        yield ParameterSpec(
            name=f"{base}.mlp.{name}.weight", shape=shape, cut=cut, layer=layer.index
        )
    for norm in SANDWICH_NORMS:
        yield ParameterSpec(
            name=f"{base}.{norm}.weight", shape=(g.hidden,), cut=Cut.WHOLE, layer=layer.index
        )


def shared_specs(g: ModelGeometry) -> Iterator[ParameterSpec]:
    """Tables, final norm and the tensors the sharder derives."""
    yield ParameterSpec(name=TABLE, shape=(g.vocab, g.hidden), cut=Cut.VOCAB_ROWS)
    if not g.tied:
        yield ParameterSpec(name=HEAD, shape=(g.vocab, g.hidden), cut=Cut.VOCAB_ROWS)
    yield ParameterSpec(name="norm.weight", shape=(g.hidden,), cut=Cut.WHOLE)
    for kind in sorted({layer.kind for layer in g.layers}):
        sample = g.layer_of_kind(kind)
        assert sample is not None
        yield ParameterSpec(
            name=inv_freq_name(kind),
            shape=(sample.head_dim // 2,),
            cut=Cut.WHOLE,
            origin="derived",
            dtype="float32",
        )
    yield ParameterSpec(name="rank", shape=(1,), cut=Cut.RANK, origin="derived", dtype="int32")


def table_of(
    g: ModelGeometry,
    specs: list[ParameterSpec],
    skipped: Mapping[str, tuple[str, ...]],
    optional: frozenset[str] = frozenset(),
) -> ParameterTable:
    """A family's table: its specs with Gemma's prefixes and the tied head's possible names."""
    tied = dict.fromkeys(HEAD_NAMES, TABLE) if g.tied else {}
    return ParameterTable(tuple(specs), TEXT_PREFIXES, tied, optional, skipped)
