"""The noise a golden measured: how far stock transformers at a port's dtype lies from stock at the golden's own.

It widens the bars of a port of that dtype, so a figure that no model can have is refused: with one, everything passes.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gemma_neuron.validation.bars import read_bars
from gemma_neuron.validation.compare import TOP_STEPS

ROUNDING = 1e-5
"""What a correlation taken in float32 may exceed 1 by, and the same."""


class Noise(BaseModel):
    """Distances of stock transformers at `dtype` from the golden, over the same texts.

    `relative`: largest distance of any recorded logit, over the text's largest; `top` the same among the k
    likeliest; `kl` the largest of a position; `pearson` the least; `gap` the largest change, in logits, of the
    lead of the likeliest token over the second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dtype: str
    relative: float = Field(ge=0)
    top: dict[int, float]
    kl: float = Field(ge=-ROUNDING)
    pearson: float = Field(ge=-1 - ROUNDING, le=1 + ROUNDING)
    gap: float = Field(ge=0)

    @field_validator("top")
    @classmethod
    def _every_step(cls, top: dict[int, float]) -> dict[int, float]:
        if sorted(top) != sorted(TOP_STEPS) or min(top.values()) < 0:
            raise ValueError(f"has to give a distance for each of {TOP_STEPS}")
        return top


def beyond_belief(noise: Noise, largest: float, *, experts: bool) -> str | None:
    """The first figure past `bars.toml`'s [noise_limits], in words, or None. `largest`: the golden's largest logit;
    `experts`: whether the model routes tokens to experts."""
    limits = read_bars().noise_limits["experts" if experts else "dense"]
    top = max(noise.top.values())
    tests = (
        ("relative", noise.relative, "of the largest logit"),
        ("relative", top, "of the largest logit among the likeliest"),
        ("kl", noise.kl, "nats of KL"),
        (
            "gap",
            noise.gap / max(largest, 1e-30),
            "of the largest logit in the lead of the likeliest",
        ),
    )
    for name, found, words in tests:
        if found > limits[name].value:
            return f"{found:.3g} {words} (limit {limits[name].value:g})"
    if noise.pearson < limits["pearson"].value:
        return f"a Pearson correlation of {noise.pearson:.3g} (limit {limits['pearson'].value:g})"
    return None
