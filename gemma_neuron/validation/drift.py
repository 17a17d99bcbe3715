"""Drift: hidden states of port and stock transformers, layer by layer, and the first layer that parts.

In: a text of the golden, the checkpoint, and the port's hidden states as its back end gives them. Out: figures by
layer. Bars: a position's distance, as a share of the length of stock's hidden state there; for a port that is not
float32 a multiple of what stock at the port's dtype shows at that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.validation.find import REFERENCE_DTYPE
from gemma_neuron.validation.prompts import LONG
from gemma_neuron.validation.reference import open_reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gemma_neuron.reports import LevelResult
    from gemma_neuron.validation.context import LevelContext

Hidden = Callable[[Sequence[int]], Iterator["NDArray[np.float32]"]]
"""Token ids of a text → each decoder layer's output, float32 [n, E]."""
HOW = "the port's side is its model code, uncompiled, on its rank files"


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """One layer's distances over all positions of the text; `noise` None for a float32 port."""

    layer: int
    kind: str
    largest: float
    median: float
    noise: float | None
    bar: float


def measure_drift(
    context: LevelContext,
    checkpoint: Path,
    hidden: Hidden,
    logits: LevelResult | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Of the text level 3 found furthest off. `first`: layer, kind, position, token, distance and bar; None when no
    layer parts."""
    text = context.reference.texts[_text_of(context, logits)]
    ids = text.ids.tolist()[: context.runner.max_context]
    dtype = context.port.spec.dtype
    stock = open_reference(checkpoint, REFERENCE_DTYPE).hidden_states(ids)
    rounded: Iterator[NDArray[np.float32] | None] = repeat(None)
    if dtype != REFERENCE_DTYPE:
        rounded = open_reference(checkpoint, dtype).hidden_states(ids)
    layers, first = [], None
    geometry = context.port.geometry.layers
    for layer, mine, theirs, noisy in zip(geometry, hidden(ids), stock, rounded, strict=False):
        progress(f"drift: layer {layer.index + 1} of {len(geometry)}")
        found = distance(mine, theirs)
        noise = None if noisy is None else float(distance(noisy, theirs).max())
        bar = _bar(context, noise)
        layers.append(_layer(layer.index, layer.kind, found, noise, bar))
        if first is None and (over := np.flatnonzero(~(found <= bar))).size:
            at = int(over[0])
            first = {
                "layer": layer.index,
                "kind": layer.kind,
                "position": at,
                "token": ids[at],
                "token_text": context.assets.tokenizer.decode([ids[at]], skip_special=False),
                "distance": _short(float(found[at])),
                "bar": _short(bar),
            }
    return {
        "text": text.name,
        "positions": len(ids),
        "how": HOW,
        "first": first,
        "layers": [asdict(item) for item in layers],
        "summary": _summary(text.name, len(ids), layers, first),
    }


def distance(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each position [n]: the length of the difference over the length of `theirs`; infinite where not finite."""
    difference = np.linalg.norm(mine.astype(np.float64) - theirs, axis=-1)
    length = np.linalg.norm(theirs.astype(np.float64), axis=-1)
    found: NDArray[np.float64] = np.nan_to_num(difference / np.maximum(length, 1e-30), nan=np.inf)
    return found


def parting_words(drift: dict[str, Any] | None) -> str:
    """Where the port parts, for the verdict's line; empty when nobody looked or no layer does."""
    first = drift["first"] if drift is not None else None
    if first is None:
        return ""
    return (
        f"layer {first['layer']} ({first['kind']}) parts first, at position {first['position']}, "
        f"token {first['token_text']!r}"
    )


def _text_of(context: LevelContext, logits: LevelResult | None) -> str:
    found: dict[str, dict[str, float]] = logits.detail.get("texts", {}) if logits else {}
    name = max(found, key=lambda name: found[name]["max_relative"], default=LONG)
    return name if name in context.reference.texts else next(iter(context.reference.texts))


def _bar(context: LevelContext, noise: float | None) -> float:
    exact = context.bars.drift["relative"].value
    return exact if noise is None else max(exact, context.bars.noise["factor"].value * noise)


def _layer(
    index: int, kind: str, found: NDArray[np.float64], noise: float | None, bar: float
) -> LayerDrift:
    return LayerDrift(
        layer=index,
        kind=kind,
        largest=_short(float(found.max())),
        median=_short(float(np.median(found))),
        noise=None if noise is None else _short(noise),
        bar=_short(bar),
    )


def _summary(
    name: str, positions: int, layers: list[LayerDrift], first: dict[str, Any] | None
) -> str:
    where = f"Text {name}, {positions} positions; {HOW}."
    if first is None:
        worst = max(layers, key=lambda item: item.largest / item.bar)
        return f"No layer parts: at most {worst.largest:.2g} of the hidden state (bar {worst.bar:.2g}). {where}"
    words = parting_words({"first": first}).removeprefix("layer")
    return f"Layer{words}: {first['distance']:.2g} of the hidden state (bar {first['bar']:.2g}). {where}"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
