"""How far a port's logits may lie from a golden: bars of its dtype, or noise the golden measured.

In: bars, golden, the port's dtype. Out: `Tolerance`, which says in one line what exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gemma_neuron.reports import Figure
from gemma_neuron.validation.bars import Bars
from gemma_neuron.validation.compare import Distances
from gemma_neuron.validation.golden import Golden
from gemma_neuron.validation.golden_tensors import largest_logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """`relative` to the text's largest logit, `top` so among the reference's k likeliest; `kl` nats; `pearson` at
    least; `margin` in logits: a flip of the likeliest token under it is noise. `source` says where the figures are
    from."""

    relative: float
    top: dict[int, float]
    kl: float
    pearson: float
    margin: float
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def problem(self, found: Distances, largest: float, start: int = 0) -> str | None:
        """The first position that exceeds a bar, in words, or None. `start` is the first's position."""
        largest = max(largest, 1e-30)
        relative = found.all / largest
        among = [(k, found.top[k] / largest, bar) for k, bar in self.top.items()]
        tests = (
            (relative > self.relative, relative, "of the largest logit off", self.relative),
            *(
                (values > bar, values, f"of the largest logit off among the likeliest {k}", bar)
                for k, values, bar in among
            ),
            (found.kl > self.kl, found.kl, "nats of KL", self.kl),
            (found.pearson < self.pearson, found.pearson, "Pearson", self.pearson),
            (found.margin > self.margin, found.margin, "logits of lead overturned", self.margin),
        )
        hits = [
            (int(np.argmax(bad)), values, words, bar)
            for bad, values, words, bar in tests
            if bad.any()
        ]
        if not hits:
            return None
        at, values, words, bar = min(hits, key=lambda hit: hit[0])
        wrong = int(np.logical_or.reduce([bad for bad, *_ in tests]).sum())
        return (
            f"position {start + at}: {float(values[at]):.3g} {words} (bar {bar:.3g}); "
            f"{wrong} of {len(relative)} positions exceed a bar"
        )

    def figures(self, texts: Iterable[dict[str, float]]) -> list[Figure]:
        """The worst of several texts' `summary` beside the bars."""
        found = list(texts)
        return [
            Figure(
                name="distance over the largest logit",
                value=max(text["max_relative"] for text in found),
                bar=self.relative,
            ),
            *(
                Figure(
                    name=f"distance among the likeliest {k}",
                    value=max(text[f"max_relative_top{k}"] for text in found),
                    bar=bar,
                )
                for k, bar in self.top.items()
            ),
            Figure(name="KL, nats", value=max(text["kl_max"] for text in found), bar=self.kl),
            Figure(
                name="Pearson",
                value=min(text["pearson_min"] for text in found),
                bar=self.pearson,
                sense="at-least",
            ),
            Figure(
                name="lead overturned, logits",
                value=max(text["largest_flip_margin"] for text in found),
                bar=self.margin,
            ),
        ]


def tolerance(bars: Bars, golden: Golden, dtype: str) -> Tolerance:
    """For a port of `dtype` against this golden."""
    largest = largest_logit(golden.texts.values())
    reference = golden.provenance.producer.get("dtype", "float32")
    exact = bars.logits["float32"]
    noise = golden.provenance.noise
    if noise is not None and noise.dtype == dtype and dtype != reference:
        factor = bars.noise["factor"].value
        return Tolerance(
            relative=max(factor * noise.relative, exact.relative.value),
            top={k: max(factor * noise.top[k], bar.value) for k, bar in exact.top.items()},
            kl=max(factor**2 * noise.kl, exact.kl.value),
            pearson=min(1 - factor**2 * (1 - noise.pearson), exact.pearson.value),
            margin=max(factor * noise.gap, exact.flip_margin.value * largest),
            source=f"{factor:g} times the noise of stock transformers at {dtype} on the same texts",
        )
    name = dtype if dtype == reference == "float32" else "bfloat16"
    chosen = bars.logits[name]
    return Tolerance(
        relative=chosen.relative.value,
        top={k: bar.value for k, bar in chosen.top.items()},
        kl=chosen.kl.value,
        pearson=chosen.pearson.value,
        margin=chosen.flip_margin.value * largest,
        source=f"bars of {name}",
    )


def summary(found: Distances, largest: float) -> dict[str, float]:
    """The figures a report keeps of one text."""
    largest = max(largest, 1e-30)
    agree = found.reference_token == found.port_token
    return {
        "positions": len(agree),
        "largest_logit": round(largest, 4),
        "max_relative": _short(float(found.all.max()) / largest),
        **{f"max_relative_top{k}": _short(float(v.max()) / largest) for k, v in found.top.items()},
        "kl_max": _short(float(found.kl.max())),
        "kl_mean": _short(float(found.kl.mean())),
        "pearson_min": round(float(found.pearson.min()), 8),
        "argmax_agreement": round(float(agree.mean()), 6),
        "largest_flip_margin": _short(float(found.margin.max())),
    }


def by_position(found: Distances, largest: float) -> dict[str, Any]:
    """What a report draws of one text: the distance at each position over the largest logit, and each position
    where the likeliest token is another."""
    flips = np.flatnonzero(found.reference_token != found.port_token)
    return {
        "relative": [_short(float(value) / max(largest, 1e-30)) for value in found.all],
        "flips": [{"position": int(at), "margin": _short(float(found.margin[at]))} for at in flips],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
