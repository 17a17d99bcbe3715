"""Prices, hints and boxes of ours, followed without buying anything.

In: regions and types. Out: events for what is new, and the first offer within the price. Spot capacity itself cannot
be watched: only a request shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemma_neuron.errors import NoCapacityError
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.boxes import boxes, note_lost
from gemma_neuron.spot.fleet import Say, Sleep
from gemma_neuron.spot.history import History
from gemma_neuron.spot.offers import Offer, Pool, Scan
from gemma_neuron.spot.patience import Lately, Patience
from gemma_neuron.spot.refusals import Refused
from gemma_neuron.spot.scan import scan
from gemma_neuron.spot.stops import require_hope

SCORE_SECONDS = 600.0
"""Between two questions for placement scores, which EC2 rations by day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is followed. `cap`: dollars an hour at which an offer ends the watch, None: none does.

    `min_score`: placement score it must have too. Seconds: `poll` between looks, `timeout` in all (None: no end).
    """

    regions: tuple[str, ...]
    types: tuple[str, ...]
    cap: float | None = None
    min_score: int | None = None
    poll: float = 60.0
    timeout: float | None = None


def watch(
    account: Account,
    history: History,
    wanted: Watched,
    say: Say,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = time.sleep,
) -> Offer:
    """The first offer within the price and score. Raises NoCapacityError at the end of the time."""
    patience = Patience(wanted.poll, wanted.timeout, clock=clock, sleep=sleep)
    scored = Lately(SCORE_SECONDS, clock)
    scores: dict[Pool, int | None] = {}
    told: dict[Any, dict[str, Any]] = {}
    while True:
        with_scores = not scored
        seen = scan(account, wanted.regions, wanted.types, history, scores=with_scores)
        require_hope(account, seen, on_demand=True)
        if with_scores:
            scored.done()
            scores = {offer.pool: offer.score for offer in seen.offers}
        _tell(seen, scores, told, say)
        _tell_boxes(account, wanted, history, told, say)
        for offer in seen.offers:
            if _good(offer, scores.get(offer.pool), wanted):
                say({"event": "found", **offer.to_json(), "score": scores.get(offer.pool)})
                return offer
        patience.rest(
            lambda gone: NoCapacityError(
                f"No offer of {', '.join(wanted.types)} came within the price in {gone:.0f} s.",
                "Watch longer, or raise --max-price.",
            )
        )


def _good(offer: Offer, score: int | None, wanted: Watched) -> bool:
    if wanted.cap is None or offer.price is None or offer.obstacle(wanted.cap):
        return False
    return wanted.min_score is None or (score is not None and score >= wanted.min_score)


def _tell(
    seen: Scan, scores: dict[Pool, int | None], told: dict[Any, dict[str, Any]], say: Say
) -> None:
    """Offers and problems that are new or changed."""
    for offer in seen.offers:
        fields = {**offer.to_json(), "score": scores.get(offer.pool)}
        if offer.offered and told.get(offer.pool) != fields:
            told[offer.pool] = fields
            say({"event": "offer", **fields})
    for problem in seen.problems:
        fields = problem.to_json()
        key = problem.region, problem.doing
        if told.get(key) != fields:
            told[key] = fields
            say({"event": "problem", **fields})


def _tell_boxes(
    account: Account, wanted: Watched, history: History, told: dict[Any, dict[str, Any]], say: Say
) -> None:
    """Boxes of any job whose state is new."""
    for region in wanted.regions:
        try:
            found = boxes(account, [region])
        except Refused:
            continue  # said as a problem of the scan, which asks the same
        note_lost(found, history)
        for box in found:
            fields = {**box.to_json(), "taken_back": box.taken_back}
            if told.get(box.instance) != fields:
                told[box.instance] = fields
                say({"event": "box", **fields})
