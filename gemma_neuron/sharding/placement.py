"""From geometry, parameter table and tp to a placement per layer and per parameter. Pure, no torch.

Rules (design section 3). KV heads are valid when `kv % tp == 0` or `tp % kv == 0`. Where tp is a proper multiple
of the query heads, that layer's attention is replicated. Everything else that does not divide is refused
with the layer, the numbers and the nearest tp that work.
"""

from __future__ import annotations

from gemma_neuron.errors import IndivisibleError
from gemma_neuron.geometry import LayerGeometry, ModelGeometry
from gemma_neuron.parameters import Cut, ParameterSpec, ParameterTable
from gemma_neuron.plan import LayerPlan, Placement, PlannedParameter, ShardPlan, Strategy

QUERY_CUTS = (Cut.QUERY_ROWS, Cut.QUERY_COLUMNS)
MOST_TP = 64
"""Largest degree searched for a nearest one that works: beyond any Inferentia2 instance's 24 cores."""


def obstacles(geometry: ModelGeometry, tp: int) -> list[str]:
    """Why `tp` cannot be, one line per kind of obstacle with layers and numbers; empty: it can."""
    found: dict[str, list[str]] = {}
    for kind in ("sliding", "global"):
        layer = geometry.layer_of_kind(kind)
        if layer is None:
            continue
        where = f"{kind} layers (first: {layer.index})"
        query, kv = layer.query_heads, layer.kv_heads
        replicated = query % tp != 0 and tp % query == 0
        if query % kv:
            found.setdefault(f"{query} query heads are no multiple of {kv} KV heads", []).append(
                where
            )
        if query % tp and not replicated:
            wrong = f"{query} query heads neither divide by {tp} nor divide it"
            found.setdefault(wrong, []).append(where)
        if kv % tp and tp % kv and not replicated:
            wrong = f"{kv} KV heads neither divide by {tp} nor divide it"
            found.setdefault(wrong, []).append(where)
    return [f"{wrong} in {' and '.join(where)}" for wrong, where in found.items()] + _widths(
        geometry, tp
    )


def _widths(geometry: ModelGeometry, tp: int) -> list[str]:
    """Widths and vocabularies that `tp` does not divide."""
    widths = sorted({layer.intermediate for layer in geometry.layers})
    found = [f"MLP width {width} does not divide by {tp}" for width in widths if width % tp]
    found += [
        f"{n:,} tokens ({key} {n}) do not divide by {tp}"
        for n, key in _vocabularies(geometry).items()
        if n % tp
    ]
    if geometry.experts is not None and geometry.experts.intermediate % tp:
        found.append(f"expert width {geometry.experts.intermediate} does not divide by {tp}")
    return found


def _vocabularies(geometry: ModelGeometry) -> dict[int, str]:
    """Rows of each table → the key of config.json that says so."""
    found = {geometry.per_layer_vocab: "vocab_size_per_layer_input", geometry.vocab: "vocab_size"}
    return {rows: key for rows, key in sorted(found.items()) if rows}


def nearest_degrees(geometry: ModelGeometry, tp: int) -> list[int]:
    """The nearest workable degrees below and above `tp`."""
    works = [n for n in range(1, MOST_TP + 1) if not obstacles(geometry, n)]
    below = [n for n in works if n < tp][-1:]
    above = [n for n in works if n > tp][:1]
    return below + above


def place(geometry: ModelGeometry, table: ParameterTable, tp: int, strategy: Strategy) -> ShardPlan:
    """The plan of one strategy. Raises IndivisibleError naming layer, numbers and the nearest tp."""
    wrong = [f"tp is {tp}; at least 1 is needed"] if tp < 1 else obstacles(geometry, tp)
    if wrong:
        near = " or ".join(f"--tp {n}" for n in nearest_degrees(geometry, tp)) or "--tp 1"
        raise IndivisibleError(f"tp {tp} cannot be: {'; '.join(wrong)}.", f"The nearest: {near}.")
    layers = tuple(place_layer(layer, tp, strategy) for layer in geometry.layers)
    known: dict[tuple[object, ...], Placement] = {}
    parameters = tuple(_planned(spec, geometry, layers, tp, known) for spec in table)
    return ShardPlan(
        tp=tp,
        strategy=strategy,
        layers=layers,
        parameters=parameters,
        reasons=tuple(dict.fromkeys(layer.reason for layer in layers if layer.reason)),
    )


def place_layer(layer: LayerGeometry, tp: int, strategy: Strategy) -> LayerPlan:
    """One layer's attention at `tp`; assumes `obstacles` found none."""
    query, kv = layer.query_heads, layer.kv_heads
    if query % tp:
        return _replicated(layer, f"{query} query heads cannot be split over {tp} ranks")
    if kv % tp and strategy == "replicate-global":
        return _replicated(layer, f"{kv} KV heads do not divide over {tp} ranks")
    shared = kv % tp != 0
    return LayerPlan(
        index=layer.index,
        kind=layer.kind,
        head_dim=layer.head_dim,
        placement="replicate-kv" if shared else "sharded",
        query_heads_per_rank=query // tp,
        kv_heads_per_rank=1 if shared else kv // tp,
        reason=f"{layer.kind} layers: {kv} KV heads over {tp} ranks, each head on {tp // kv} adjacent "
        "ranks"
        if shared
        else "",
    )


def _replicated(layer: LayerGeometry, why: str) -> LayerPlan:
    return LayerPlan(
        index=layer.index,
        kind=layer.kind,
        head_dim=layer.head_dim,
        placement="replicated",
        query_heads_per_rank=layer.query_heads,
        kv_heads_per_rank=layer.kv_heads,
        reason=f"{layer.kind} layers: {why}, so every rank computes their attention whole",
    )


def _planned(
    spec: ParameterSpec,
    geometry: ModelGeometry,
    layers: tuple[LayerPlan, ...],
    tp: int,
    known: dict[tuple[object, ...], Placement],
) -> PlannedParameter:
    """`known` keeps the few different placements of a plan: hundreds of parameters share them."""
    layer = None if spec.layer is None else layers[spec.layer]
    kv_heads = 0 if spec.layer is None else geometry.layers[spec.layer].kv_heads
    key = (spec.cut, None if layer is None else (layer.placement, layer.reason), kv_heads)
    placement = known.get(key)
    if placement is None:
        placement = known[key] = _placement(spec.cut, layer, kv_heads, tp)
    return PlannedParameter(
        name=spec.name,
        shape=spec.shape,
        local_shape=placement.local_shape(spec.shape),
        placement=placement,
        layer=spec.layer,
        derived=spec.origin == "derived",
        dtype=spec.dtype,
        buffer=spec.buffer,
    )


def _placement(cut: Cut, layer: LayerPlan | None, kv_heads: int, tp: int) -> Placement:
    """What a cut means for this layer at this degree."""
    if cut is Cut.RANK:
        return Placement(kind="rank", parts=1)
    attention = cut in QUERY_CUTS or cut is Cut.KV_ROWS
    if cut is Cut.WHOLE or tp == 1 or (attention and layer and layer.placement == "replicated"):
        return Placement(kind="whole", parts=1, reason=layer.reason if layer and attention else "")
    if cut is Cut.KV_ROWS and kv_heads % tp:
        assert layer is not None
        return Placement(kind="repeated-rows", parts=kv_heads, reason=layer.reason)
    if cut in (Cut.QUERY_COLUMNS, Cut.WIDTH_COLUMNS):
        return Placement(kind="columns", parts=tp)
    if cut is Cut.EXPERT_GATE_UP:
        return Placement(kind="expert-gate-up", parts=tp)
    if cut is Cut.EXPERT_DOWN:
        return Placement(kind="expert-down", parts=tp)
    return Placement(kind="rows", parts=tp)
