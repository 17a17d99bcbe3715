"""The released Gemma 4 sizes by name: what a plan can put beside another model, and what published runs ran.

In: a name. Out: the text part of that size's `config.json`, or its geometry. Nothing is fetched.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.registry import read_geometry

DATA = "gemma4_sizes.json"


@cache
def _facts() -> dict[str, Any]:
    text = resources.files("gemma_neuron.data").joinpath(DATA).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def size_names() -> tuple[str, ...]:
    """Smallest first: E2B, E4B, 12B, 26B-A4B, 31B."""
    return tuple(_facts()["sizes"])


def size_text(name: str) -> dict[str, Any]:
    """Text part of the size's `config.json` (`sliding_window_pattern` instead of `layer_types`)."""
    return {**_facts()["common"], **_facts()["sizes"][name]}


@cache
def size_geometry(name: str) -> ModelGeometry:
    """Geometry of a size. Raises KeyError for an unknown name."""
    return read_geometry(size_text(name))


def size_of(geometry: ModelGeometry) -> str | None:
    """The released size whose layers and widths these are, or None."""
    for name in size_names():
        known = size_geometry(name)
        if (known.layers, known.hidden, known.vocab) == (
            geometry.layers,
            geometry.hidden,
            geometry.vocab,
        ):
            return name
    return None
