"""The pass bars, read from `data/validation/bars.toml`; each has a value and a source."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).parent.parent / "data" / "validation" / "bars.toml"


class Bar(BaseModel):
    """One bar and the requirement, publication or measurement it stands on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    source: str


class LogitBars(BaseModel):
    """How far logits may part at one dtype.

    `relative`, `flip_margin` and `top`, among the reference's k likeliest, are fractions of its largest logit; `kl`
    in nats, per position; `pearson` the least correlation over the vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    relative: Bar
    top: dict[int, Bar]
    kl: Bar
    pearson: Bar
    flip_margin: Bar


class Bars(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    logits: dict[str, LogitBars]
    noise: dict[str, Bar]
    noise_limits: dict[str, dict[str, Bar]]
    prompt: dict[str, Bar]
    reference: dict[str, Bar]
    chat: dict[str, Bar]
    task: dict[str, Bar]
    degenerate: dict[str, Bar]
    drift: dict[str, Bar]


@cache
def read_bars() -> Bars:
    """The packaged bars."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return Bars.model_validate({"schema_version": data.pop("schema"), **data})
