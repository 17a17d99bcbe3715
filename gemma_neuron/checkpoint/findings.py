"""Findings as they are collected: a hostile checkpoint must not turn into a report of a million lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from gemma_neuron.reports import Finding, FindingKind, Severity

MOST_PER_KIND = 1000
"""Whoever has more of one kind has one mistake, not a thousand."""


class FindingList:
    """Findings in the order found, at most MOST_PER_KIND of a kind; the rest are counted."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._seen: Counter[tuple[FindingKind, Severity]] = Counter()

    def add(
        self,
        kind: FindingKind,
        message: str,
        *,
        severity: Severity = "error",
        tensor: str = "",
        file: str = "",
    ) -> None:
        self.extend(
            [Finding(kind=kind, severity=severity, message=message, tensor=tensor, file=file)]
        )

    def extend(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            key = (finding.kind, finding.severity)
            self._seen[key] += 1
            if self._seen[key] <= MOST_PER_KIND:
                self._kept.append(finding)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kept)

    def done(self) -> tuple[Finding, ...]:
        """All that was kept, and one more a kind that says how many were not."""
        more = (
            Finding(
                kind=kind, severity=severity, message=f"{count - MOST_PER_KIND:,} more like this."
            )
            for (kind, severity), count in self._seen.items()
            if count > MOST_PER_KIND
        )
        return (*self._kept, *more)
