"""What was seen of a pool: one instance type in one zone. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Lifecycle = Literal["spot", "on-demand"]
Kind = Literal[
    "capacity", "price", "pool", "quota", "authorisation", "credentials", "throttling", "unknown", "setup",
    "settling",
]  # fmt: skip
"""Of a refusal. `pool`: this zone never has the type. `unknown`: whether the request was carried out cannot be told.

`setup`: the request or what it names is wrong, and will be next time. `settling`: what it names was made a moment ago,
here or by another, and is not seen everywhere yet."""


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Where capacity comes from: EC2 has it, or has not, for each type in each zone."""

    region: str
    zone: str
    type: str

    def __str__(self) -> str:
        return f"{self.type} in {self.zone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A pool as it stands. Prices are US dollars an hour, `low` and `high` over the last day; None: not known.

    `score`: EC2's placement score, 1 to 10, a hint only: asked for fewer than three types it is always low.
    `had`: how often we got a box there in the last week, `last_had` when (ISO 8601, UTC), or empty; `kept_minutes`: how
    long those taken back were kept, the median.
    """

    pool: Pool
    offered: bool
    vcpus: int | None
    price: float | None = None
    low: float | None = None
    high: float | None = None
    quota_vcpus: int | None = None
    used_vcpus: int | None = None
    score: int | None = None
    had: int = 0
    last_had: str = ""
    kept_minutes: float | None = None

    def obstacle(self, cap: float | None) -> str:
        """Why no spot box can be had here at `cap` dollars an hour, or empty."""
        if not self.offered:
            return "not offered"
        if self.lacks_quota:
            return f"quota {self.quota_vcpus} vCPUs, {self.used_vcpus or 0} in use, {self.vcpus} needed"
        if cap is not None and self.price is not None and self.price > cap:
            return f"{self.price:.4f} is over the cap of {cap:.4f}"
        return ""

    @property
    def lacks_quota(self) -> bool:
        """Whether the account's spot quota, less what runs, is known to be too small."""
        if self.quota_vcpus is None or self.vcpus is None:
            return False
        return self.quota_vcpus - (self.used_vcpus or 0) < self.vcpus

    @property
    def rank(self) -> tuple[Any, ...]:
        """Smaller is better: where we had one lately, then cheap, then by the hint."""
        price = float("inf") if self.price is None else self.price
        return (not self.offered, self.lacks_quota, -self.had, price, -(self.score or 0), self.pool)

    def to_json(self) -> dict[str, Any]:
        """The fields of `offers[]` in the JSON contract, and more."""
        return {
            "region": self.pool.region,
            "zone": self.pool.zone,
            "type": self.pool.type,
            "offered": self.offered,
            "price": self.price,
            "price_low": self.low,
            "price_high": self.high,
            "vcpus": self.vcpus,
            "quota_vcpus": self.quota_vcpus,
            "used_vcpus": self.used_vcpus,
            "score": self.score,
            "had": self.had,
            "last_had": self.last_had or None,
            "kept_minutes": self.kept_minutes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What could not be asked of a region. `kind` and `doing` as in `refusals`.

    `decides`: nothing can be said of the region without it; otherwise it only informs.
    """

    region: str
    kind: Kind
    code: str
    doing: str
    said: str
    decides: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "kind": self.kind,
            "code": self.code,
            "message": f"{self.doing}: {self.said}",
        }


@dataclass(frozen=True, slots=True)
class Scan:
    """Offers, best first, and what could not be seen."""

    offers: tuple[Offer, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "offers": [offer.to_json() for offer in self.offers],
            "problems": [problem.to_json() for problem in self.problems],
        }
