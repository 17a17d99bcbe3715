"""How often is enough: separate budgets for failures, scale-ups and preemptions, and poisoned units."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from gemma_neuron.elastic.faults import ReplicaDownError

ElasticEventKind = Literal["failure", "scale_up", "preemption"]
POISONED_AFTER = 2
"""A unit that fails twice in the same way would fail a third time."""


@dataclass(frozen=True, slots=True)
class ElasticRetryLimit:
    """At most `max_attempts` attempts in all, as pathwaysutils counts: 1 means no second one."""

    max_attempts: int | None = None

    def allows(self, attempts: int) -> bool:
        """Whether another attempt may follow `attempts` that ended so."""
        return self.max_attempts is None or attempts < self.max_attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """A budget of its own for each reason to begin again; None is no limit.

    pathwaysutils has one budget for all: three scale-ups, which are good news, use up three retries there.
    """

    failures: ElasticRetryLimit = field(default_factory=lambda: ElasticRetryLimit(10))
    scale_ups: ElasticRetryLimit = field(default_factory=ElasticRetryLimit)
    preemptions: ElasticRetryLimit = field(default_factory=ElasticRetryLimit)

    def limit(self, kind: ElasticEventKind) -> ElasticRetryLimit:
        limits = {
            "failure": self.failures,
            "scale_up": self.scale_ups,
            "preemption": self.preemptions,
        }
        return limits[kind]


class PoisonWatch:
    """Counts faults by unit and signature. `poisoned` is true once a unit failed twice in the same way."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def count(self, unit: str, signature: str) -> bool:
        """Note one failure; whether the unit is poisoned now."""
        self._seen[unit, signature] += 1
        return self._seen[unit, signature] >= POISONED_AFTER

    def count_fault(self, unit: str, fault: ReplicaDownError) -> bool:
        return self.count(unit, fault.signature)
