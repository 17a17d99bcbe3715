"""The wait for a box: round after round over the regions, until one is had, adopted, or nothing more may be asked.

In: what is wanted and within which bounds. Out: a Taken. Raises QuotaError and AccessError at once, NoCapacityError at
the end of the time. The clock and the sleep are arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gemma_neuron.errors import NoCapacityError
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.boxes import Box, boxes, note_lost, running, terminate
from gemma_neuron.spot.fleet import Answer, Ask, Fleet, Say, Sleep, summary
from gemma_neuron.spot.history import History
from gemma_neuron.spot.offers import Lifecycle, Pool, Scan
from gemma_neuron.spot.patience import Lately, Patience
from gemma_neuron.spot.prices import affordable
from gemma_neuron.spot.refusals import WAITED_OUT, Refused, error_for
from gemma_neuron.spot.region import RegionState
from gemma_neuron.spot.scan import scan
from gemma_neuron.spot.stops import require_hope, stop_for
from gemma_neuron.spot.template import BoxSpec, NoPlaceError, look, make

RESCAN_SECONDS = 900.0
"""Prices and quota are looked at again this often while waiting."""
MOST_UNSETTLED = 10
"""Rounds in which a region does not see what was made there; EC2 settles within seconds, a missing group never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be had. `cap`: dollars an hour. Seconds: `poll` between rounds, `timeout` in all (None: no end),

    `on_demand_after` before a box is also asked for on demand (None: never).
    """

    spec: BoxSpec
    regions: tuple[str, ...]
    types: tuple[str, ...]
    profile: str
    user_data: Callable[[str], str]
    cap: float | None = None
    poll: float = 30.0
    timeout: float | None = None
    on_demand_after: float | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The box, and whether it was there before. `rounds`: how often the regions were asked for it."""

    box: Box
    adopted: bool
    rounds: int
    seconds: float


class Poller:
    """One wait. `say` gets an event a line of JSON; it is called from this thread."""

    def __init__(
        self,
        account: Account,
        history: History,
        wanted: Wanted,
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._account, self._history, self._wanted, self._say = account, history, wanted, say
        self._patience = Patience(wanted.poll, wanted.timeout, clock=clock, sleep=sleep)
        self._fleet = Fleet(account, history, say, sleep)
        self._regions = {name: RegionState() for name in wanted.regions}
        self._rounds = 0
        self._scanned = Lately(RESCAN_SECONDS, clock)
        self._scan = Scan((), ())

    def take(self, seen: Scan) -> Taken:
        """A box of the job: the one that runs, or the first that can be had."""
        self._use(seen)
        there = self._running()
        if there is not None:
            return self._adopted(there)
        while True:
            self._rounds += 1
            taken = self._round()
            if taken is not None:
                return taken
            self._wait()

    def _running(self) -> Box | None:
        """A box of the job that is there already, also where an earlier run had one."""
        job = self._wanted.spec.job
        settled = self._fleet.settle(job)
        if settled is not None:
            return settled
        wanted = set(self._wanted.regions)
        found: list[Box] = []
        for region in sorted(wanted | self._history.regions_of_boxes()):
            try:
                found += boxes(self._account, [region], job)
            except Refused as refused:
                if region in wanted:  # there may be one: asking for another would double it
                    raise error_for(refused) from refused
                self._say({"event": "not-looked-at", "region": region, "code": refused.code})
        note_lost(found, self._history)
        return next((box for box in found if box.runs), None)

    def _round(self) -> Taken | None:
        asked = False
        for name in self._order():
            region = self._regions[name]
            if region.pause:
                region.pause -= 1
                continue
            for lifecycle in self._lifecycles():
                pools = self._pools(name, region, lifecycle)
                asked |= bool(pools)
                taken = self._ask(name, region, lifecycle, pools) if pools else None
                if taken is not None:
                    return taken
        if not asked:
            self._say_nothing_to_ask()
        return None

    def _order(self) -> list[str]:
        """Regions by their best offer; one that could not be seen comes last, and is looked at again first."""
        best: dict[str, int] = {}
        for index, offer in enumerate(self._scan.offers):
            best.setdefault(offer.pool.region, index)
        unseen = [name for name in self._regions if name not in best]
        if unseen or not self._scanned:
            self._rescan(unseen)
        return sorted(
            self._regions, key=lambda name: best.get(name, len(best) + len(self._scan.offers))
        )

    def _lifecycles(self) -> tuple[Lifecycle, ...]:
        after = self._wanted.on_demand_after
        if after is not None and self._patience.gone >= after:
            return ("spot", "on-demand")
        return ("spot",)

    def _ask(
        self, name: str, region: RegionState, lifecycle: Lifecycle, pools: tuple[Pool, ...]
    ) -> Taken | None:
        """One request to one region."""
        try:
            ask = self._question(name, region, lifecycle, pools)
            answer = self._fleet.ask(ask)
        except NoPlaceError as error:
            self._leave_out(name, region, error)
            return None
        except Refused as refused:
            self._refused(name, region, lifecycle, refused)
            return None
        return self._answered(name, region, ask, answer)

    def _question(
        self, name: str, region: RegionState, lifecycle: Lifecycle, pools: tuple[Pool, ...]
    ) -> Ask:
        """The request, once the region has what a box needs. Raises NoPlaceError, CloudSetupError or Refused."""
        wanted = self._wanted
        if region.place is None:
            region.place = look(self._account, name, wanted.spec)
        place = region.place
        pools = tuple(pool for pool in pools if pool.zone in place.subnets)
        if not pools:
            raise NoPlaceError(
                f"{name}: no subnet lies in a zone that offers {', '.join(wanted.types)}.",
                "Name subnets of those zones: --subnets.",
            )
        if region.template is None:
            script = wanted.user_data(name)
            region.template = make(self._account, place, wanted.spec, wanted.profile, script)
        return Ask(
            job=wanted.spec.job,
            region=name,
            pools=pools,
            template=region.template,
            subnets=dict(place.subnets),
            lifecycle=lifecycle,
            cap=wanted.cap,
        )

    def _leave_out(self, name: str, region: RegionState, error: NoPlaceError) -> None:
        """A region without a place for a box ends the wait only when it was the last."""
        region.left_out = True
        self._say({"event": "left-out", "region": name, "why": error.message, "hint": error.hint})
        if all(state.left_out for state in self._regions.values()):
            raise error

    def _pools(self, name: str, region: RegionState, lifecycle: Lifecycle) -> tuple[Pool, ...]:
        """What may be asked of a region: offered, within quota and price, and not known never to have it."""
        cap = self._wanted.cap
        offers = region.offers(name, self._scan)
        if lifecycle == "on-demand":
            return tuple(o.pool for o in offers if affordable(self._account, o.pool, cap))
        return tuple(offer.pool for offer in offers if not offer.obstacle(cap))

    def _refused(
        self, name: str, region: RegionState, lifecycle: Lifecycle, refused: Refused
    ) -> None:
        """Of the whole request. Waits out what time may cure, and ends the wait for the rest."""
        self._say_tried(name, lifecycle, 0, {refused.code: 1}, refused.kind)
        if refused.kind == "throttling":
            region.slow_down()
        elif refused.kind == "settling":
            self._settle(region, refused)
        elif refused.kind == "pool":
            region.dropped |= {offer.pool for offer in region.offers(name, self._scan)}
            self._require_some_left()
        elif refused.kind not in WAITED_OUT:
            raise error_for(refused) from refused

    def _answered(self, name: str, region: RegionState, ask: Ask, answer: Answer) -> Taken | None:
        region.slowness = 1
        kinds = {refusal.kind for refusal in answer.refusals}
        kind = "had" if answer.box is not None else "+".join(sorted(kinds)) or "capacity"
        self._say_tried(name, ask.lifecycle, len(ask.pools), summary(answer.refusals), kind)
        for refusal in answer.refusals:
            if refusal.kind == "pool" and refusal.pool is not None:
                region.dropped.add(refusal.pool)
            elif refusal.kind in ("capacity", "price") and refusal.pool is not None:
                self._history.add(refusal.pool, "none", ask.lifecycle)
        if answer.box is not None:
            box = answer.box
            self._history.add(box.pool, "had", ask.lifecycle, instance=box.instance)
            return self._adopted(box) if answer.adopted else self._launched(box)
        stop_for(ask, answer.refusals, region.dropped)
        if "throttling" in kinds:
            region.slow_down()
        if "settling" in kinds:
            first = next(refusal for refusal in answer.refusals if refusal.kind == "settling")
            doing = "ec2:CreateFleet"
            said = Refused(first.kind, first.code, first.said, region=name, doing=doing)
            self._settle(region, said)
        if "pool" in kinds:
            self._require_some_left()
        return None

    def _settle(self, region: RegionState, refused: Refused) -> None:
        """EC2 does not see everywhere what was made, or another made it first: it is looked up again next round."""
        region.template = None
        region.unsettled += 1
        if region.unsettled > MOST_UNSETTLED:
            raise error_for(refused) from refused

    def _require_some_left(self) -> None:
        """Raise NoCapacityError when no zone is left that has a type at all."""
        for name, region in self._regions.items():
            if self._pools(name, region, "spot") or (
                self._wanted.on_demand_after is not None and self._pools(name, region, "on-demand")
            ):
                return
        raise NoCapacityError(
            f"No zone of {', '.join(self._regions)} supports {', '.join(self._wanted.types)} with these subnets and "
            "this image.",
            "Try other --regions or --types.",
        )

    def _launched(self, box: Box) -> Taken:
        """A box of our own; of two that two machines launched at once, the older stays."""
        rivals: list[Box] = []
        try:
            rivals = running(self._account, [box.pool.region], box.job)
        except Refused as refused:
            self._say({"event": "not-looked-at", "region": box.pool.region, "code": refused.code})
        first = rivals[0] if rivals else box
        if first.instance != box.instance and any(r.instance == box.instance for r in rivals):
            try:
                terminate(self._account, box)
            except Refused as refused:
                raise error_for(refused) from refused
            self._say({"event": "given-back", **box.to_json()})
            return self._adopted(first)
        self._say({"event": "launched", **box.to_json()})
        return Taken(box, False, self._rounds, self._patience.gone)

    def _adopted(self, box: Box) -> Taken:
        self._say({"event": "adopted", **box.to_json()})
        return Taken(box, True, self._rounds, self._patience.gone)

    def _wait(self) -> None:
        """Until the next round, with jitter; raises NoCapacityError at the end of the time."""
        wanted = self._wanted
        self._patience.rest(
            lambda gone: NoCapacityError(
                f"No box of {', '.join(wanted.types)} could be had in {', '.join(wanted.regions)}: asked in "
                f"{self._rounds} rounds over {gone:.0f} s.",
                "Run the same command again, or add --regions, --types, a higher --max-price or --on-demand-after.",
            ),
            lambda seconds: self._say(
                {"event": "waiting", "round": self._rounds, "seconds": round(seconds, 1)}
            ),
        )

    def _use(self, seen: Scan, *, whole: bool = True) -> None:
        """Go by what was seen, unless it says that nothing can come of it."""
        self._scan = seen
        if whole:
            self._scanned.done()
        wanted = self._wanted
        require_hope(self._account, seen, on_demand=wanted.on_demand_after is not None)

    def _rescan(self, unseen: list[str]) -> None:
        """Look again at everything, or at regions that could not be seen."""
        whole = not self._scanned
        names = self._wanted.regions if whole else tuple(unseen)
        fresh = scan(self._account, names, self._wanted.types, self._history, scores=False)
        kept = [] if whole else [o for o in self._scan.offers if o.pool.region not in names]
        offers = tuple(sorted([*kept, *fresh.offers], key=lambda offer: offer.rank))
        self._use(Scan(offers, fresh.problems), whole=whole)

    def _say_nothing_to_ask(self) -> None:
        """Every pool has an obstacle: price or quota, or the region throttles or could not be seen."""
        cap = self._wanted.cap
        obstacles = {
            offer.pool.zone: offer.obstacle(cap) or "paused"
            for offer in self._scan.offers
            if offer.offered
        }
        self._say({"event": "nothing-to-ask", "round": self._rounds, "obstacles": obstacles})

    def _say_tried(
        self, region: str, lifecycle: Lifecycle, pools: int, codes: dict[str, int], outcome: str
    ) -> None:
        self._say(
            {
                "event": "tried",
                "round": self._rounds,
                "region": region,
                "lifecycle": lifecycle,
                "pools": pools,
                "outcome": outcome,
                "codes": codes,
            }
        )
