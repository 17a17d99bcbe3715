"""Inputs that are nearly right, for the targets of `tests.fuzz.targets`, as hypothesis strategies of bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.real_configs import NAMES, real_config, text_of

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
COUNTS = (
    st.integers(min_value=-2, max_value=40)
    | st.sampled_from([2**31, 2**62, 2**63, 2**64])
    | st.integers()
)
TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F64", "F8_E4M3", "Q"]) | ODD,
        "shape": st.lists(COUNTS, max_size=4) | ODD,
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2) | ODD,
    },
    optional={"extra": ODD},
)
NAME = st.sampled_from(["a", "b", "c", "__metadata__", "../x", "a\x1b[2J"]) | st.text(max_size=6)
HEADER = st.dictionaries(NAME, TENSOR | ODD, max_size=5)
FILE = st.sampled_from(
    ["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "/a.safetensors", "index", ""]
) | st.text(max_size=8)  # fmt: skip
WEIGHT_MAP = st.dictionaries(st.sampled_from(["a", "b"]) | st.text(max_size=4), FILE, max_size=5)
INDEX = st.fixed_dictionaries(
    {"weight_map": st.one_of(WEIGHT_MAP, WEIGHT_MAP, WEIGHT_MAP, ODD)}, optional={"metadata": ODD}
)
KEYS = sorted(
    {key for name in NAMES for key in text_of(real_config(name))}
    | {"per_layer_config", "rope_scaling", "rope_theta", "text_config", "model_type"}
)
LIKELY: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"05": {"head_dim": 8}}, {"0": {}}, {"full_attention": {}}, {"rope_type": "linear"},
        ["sliding_attention"], ["full_attention"] * 60, 1, 0, 6, 2**31, True, None, "gemma3", 1e999,
    ]
)  # fmt: skip
EDITS = st.dictionaries(st.sampled_from(KEYS), ODD | LIKELY, min_size=1, max_size=4)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _damaged(value: Any, at: int, put: bytes) -> bytes:
    """JSON text with some bytes written over it."""
    text = bytearray(_json(value))
    at %= len(text) + 1
    text[at : at + len(put)] = put
    return bytes(text)


def _texts(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[bytes]:
    """Values as JSON, whole or damaged, and plain bytes."""
    damaged = st.builds(_damaged, values, st.integers(0, 400), st.binary(min_size=1, max_size=3))
    whole = values.map(_json)
    return st.one_of(whole, whole, whole, damaged, st.binary(max_size=size))


CONFIGS = st.sampled_from(NAMES).map(real_config)
BYTES: dict[str, st.SearchStrategy[bytes]] = {
    "raw": st.binary(max_size=300),
    "header": _texts(HEADER, 200).map(lambda text: text.removeprefix(b"{")),
    "index": _texts(INDEX, 200),
    "config": _texts(CONFIGS | EDITS | ODD, 100),
    "edits": EDITS.map(_json),
    "prompt": st.builds(
        lambda first, text: bytes([first]) + text, st.integers(0, 2), _texts(ODD, 100)
    ),
    "weights": st.binary(min_size=5, max_size=40),
}
