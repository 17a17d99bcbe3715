"""What a wait for a box keeps of one region. A value that changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemma_neuron.spot.offers import Offer, Pool, Scan
from gemma_neuron.spot.template import Place

SLOWEST = 8
"""Of a region that throttles: it is left out of one round, then of two, four, eight."""


@dataclass(slots=True)
class RegionState:
    """`template`: (id, version). `dropped`: pools that never have the type; `pause`: rounds to leave out.

    `left_out`: nothing of the account's there takes a box. `unsettled`: how often what was made was not seen yet.
    """

    place: Place | None = None
    template: tuple[str, str] | None = None
    dropped: set[Pool] = field(default_factory=set)
    pause: int = 0
    slowness: int = 1
    left_out: bool = False
    unsettled: int = 0

    def offers(self, name: str, seen: Scan) -> list[Offer]:
        """What may still be asked for in the region called `name`, best first, whatever it costs."""
        if self.left_out:
            return []
        return [
            offer
            for offer in seen.offers
            if offer.pool.region == name and offer.offered and offer.pool not in self.dropped
        ]

    def slow_down(self) -> None:
        """It throttles: ask it less often than before."""
        self.pause, self.slowness = self.slowness, min(2 * self.slowness, SLOWEST)
