"""What each region has on offer: zones, prices, quota, and hints. Reads only; costs nothing.

In: regions and types. Out: a Scan. A region that cannot be asked is a Problem there; what only informs (prices,
quota, scores) may be missing from an offer, what decides (offerings) may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gemma_neuron.spot.account import Account
from gemma_neuron.spot.history import History
from gemma_neuron.spot.offers import Offer, Pool, Problem, Scan
from gemma_neuron.spot.quota import family_of, spot_quota, vcpus_of, vcpus_running
from gemma_neuron.spot.refusals import Refused, asking

DAY = timedelta(days=1)
LINUX = ["Linux/UNIX"]


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars an hour: now, and the least and most of the last day."""

    now: float
    low: float
    high: float


def scan(
    account: Account,
    regions: Sequence[str],
    types: Sequence[str],
    history: History,
    *,
    scores: bool = True,
) -> Scan:
    """Offers of every region, best first. `scores`: ask for placement scores too, which EC2 rations."""
    offers: list[Offer] = []
    problems: list[Problem] = []
    hints = _scores(account, regions, types, problems) if scores else {}
    for region in regions:
        try:
            offers += _region(account, region, types, history, hints, problems)
        except Refused as refused:
            problems.append(_problem(refused, decides=True))
    return Scan(tuple(sorted(offers, key=lambda offer: offer.rank)), tuple(problems))


def _region(
    account: Account,
    region: str,
    types: Sequence[str],
    history: History,
    scores: dict[tuple[str, str], int],
    problems: list[Problem],
) -> Iterable[Offer]:
    zones = _zones(account, region)
    offered = _offerings(account, region, types)
    prices = _prices(account, region, types, problems) if offered else {}
    quota: dict[str, tuple[int | None, int | None]] = {}
    for name in {family_of(t) for _, t in offered} - {""}:
        try:
            quota[name] = spot_quota(account, region, name), vcpus_running(account, region, name)
        except Refused as refused:
            problems.append(_problem(refused))
    for type_ in types:
        vcpus = None
        if any(t == type_ for _, t in offered):
            try:
                vcpus = vcpus_of(account, region, type_)
            except Refused as refused:
                problems.append(_problem(refused))
        limit, used = quota.get(family_of(type_), (None, None))
        for zone, zone_id in zones.items():
            pool, price = Pool(region, zone, type_), prices.get((zone, type_))
            had, last = history.had(pool)
            yield Offer(
                pool=pool,
                offered=(zone, type_) in offered,
                vcpus=vcpus,
                price=price.now if price else None,
                low=price.low if price else None,
                high=price.high if price else None,
                quota_vcpus=limit,
                used_vcpus=used,
                score=scores.get((region, zone_id)),
                had=had,
                last_had=last,
                kept_minutes=history.kept(pool),
            )


def _zones(account: Account, region: str) -> dict[str, str]:
    """Zones of the region that are up → their ids, which are the same in every account."""
    with asking(region, "ec2:DescribeAvailabilityZones"):
        found = account.ec2(region).describe_availability_zones(
            Filters=[{"Name": "state", "Values": ["available"]}]
        )["AvailabilityZones"]
    return {
        row["ZoneName"]: row.get("ZoneId", "")
        for row in sorted(found, key=lambda row: str(row["ZoneName"]))
        if row.get("ZoneType", "availability-zone") == "availability-zone"
    }


def _offerings(account: Account, region: str, types: Sequence[str]) -> set[tuple[str, str]]:
    """(zone, type) that EC2 offers at all."""
    with asking(region, "ec2:DescribeInstanceTypeOfferings"):
        pages = account.ec2(region).get_paginator("describe_instance_type_offerings")
        filters = [{"Name": "instance-type", "Values": list(types)}]
        return {
            (row["Location"], row["InstanceType"])
            for page in pages.paginate(LocationType="availability-zone", Filters=filters)
            for row in page["InstanceTypeOfferings"]
        }


def _prices(
    account: Account, region: str, types: Sequence[str], problems: list[Problem]
) -> dict[tuple[str, str], Price]:
    """Spot prices of the last day by (zone, type); what cannot be had is a problem, no more."""
    seen: dict[tuple[str, str], list[tuple[datetime, float]]] = {}
    try:
        with asking(region, "ec2:DescribeSpotPriceHistory"):
            pages = account.ec2(region).get_paginator("describe_spot_price_history")
            asked = {
                "InstanceTypes": list(types),
                "ProductDescriptions": LINUX,
                "StartTime": datetime.now(UTC) - DAY,
            }
            for page in pages.paginate(**asked):
                for row in page["SpotPriceHistory"]:
                    key = row["AvailabilityZone"], row["InstanceType"]
                    seen.setdefault(key, []).append((row["Timestamp"], float(row["SpotPrice"])))
    except Refused as refused:
        problems.append(_problem(refused))
    found = {}
    for key, rows in seen.items():
        rows.sort()
        amounts = [amount for _, amount in rows]
        found[key] = Price(amounts[-1], min(amounts), max(amounts))
    return found


def _scores(
    account: Account, regions: Sequence[str], types: Sequence[str], problems: list[Problem]
) -> dict[tuple[str, str], int]:
    """Placement scores by (region, zone id). EC2 gives the ten best only; no answer is no score."""
    if not regions:
        return {}
    region = regions[0]
    try:
        with asking(region, "ec2:GetSpotPlacementScores"):
            rows = account.ec2(region).get_spot_placement_scores(
                InstanceTypes=list(types),
                TargetCapacity=1,
                TargetCapacityUnitType="units",
                SingleAvailabilityZone=True,
                RegionNames=list(regions),
            )["SpotPlacementScores"]
    except Refused as refused:
        problems.append(_problem(refused))
        return {}
    return {(row["Region"], row.get("AvailabilityZoneId", "")): int(row["Score"]) for row in rows}


def _problem(refused: Refused, *, decides: bool = False) -> Problem:
    return Problem(
        region=refused.region,
        kind=refused.kind,
        code=refused.code,
        doing=refused.doing,
        said=refused.said,
        decides=decides,
    )
