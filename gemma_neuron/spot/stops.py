"""When waiting for a box is given up at once: rights, credentials, quota, nothing on offer.

In: what was seen of the regions, or what a request was answered. Out: nothing, or the error that ends the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemma_neuron.errors import GemmaNeuronError, NoCapacityError, QuotaError
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.fleet import Ask, Refusal
from gemma_neuron.spot.offers import Offer, Pool, Problem, Scan
from gemma_neuron.spot.quota import family_of, quota, quota_code
from gemma_neuron.spot.refusals import WAITED_OUT, Refused, error_for


def require_hope(account: Account, seen: Scan, *, on_demand: bool) -> None:
    """Raise AccessError, NoCapacityError or QuotaError when nothing can come of asking these regions.

    `on_demand`: a box on demand would do as well, if the quota for those allows it.
    """
    deciding = [problem for problem in seen.problems if problem.decides]
    for problem in deciding:
        if problem.kind in ("authorisation", "credentials"):
            raise problem_error(problem)
    if deciding:
        return  # a region that did not answer now may answer later
    offered = [offer for offer in seen.offers if offer.offered]
    if not offered:
        regions = sorted({offer.pool.region for offer in seen.offers})
        types = sorted({offer.pool.type for offer in seen.offers})
        raise NoCapacityError(
            f"No zone of {', '.join(regions)} offers {', '.join(types)}.",
            "Try other --regions or --types: `gemma-neuron spot scan --regions all`.",
        )
    if not all(offer.lacks_quota for offer in offered):
        return
    if not (on_demand and _on_demand_quota(account, offered)):
        raise quota_error(offered)


def require_some_seen(seen: Scan) -> None:
    """Raise what kept every region from being seen."""
    deciding = [problem for problem in seen.problems if problem.decides]
    if deciding and not seen.offers:
        raise problem_error(deciding[0])


def problem_error(problem: Problem) -> GemmaNeuronError:
    return error_for(
        Refused(
            problem.kind, problem.code, problem.said, region=problem.region, doing=problem.doing
        )
    )


def stop_for(ask: Ask, refusals: Sequence[Refusal], dropped: set[Pool]) -> None:
    """Raise for what no wait cures: rights always, quota unless the request named a type within it.

    Adds to `dropped` the pools of a type that is over the quota.
    """
    for refusal in refusals:
        if refusal.kind == "quota" and refusal.pool is not None:
            dropped |= {pool for pool in ask.pools if pool.type == refusal.pool.type}
    others = [pool for pool in ask.pools if pool not in dropped]
    for refusal in refusals:
        ends = refusal.kind not in (*WAITED_OUT, "pool", "quota")
        if ends or (refusal.kind == "quota" and not others):
            doing = f"ec2:CreateFleet ({ask.lifecycle}, {refusal.pool or ask.region})"
            raise error_for(
                Refused(refusal.kind, refusal.code, refusal.said, region=ask.region, doing=doing)
            )


def quota_error(offered: Sequence[Offer]) -> QuotaError:
    """What is said when no region's quota allows any of the types."""
    least = {offer.pool.region: offer for offer in reversed(offered)}
    regions = ", ".join(f"{name} {offer.obstacle(None)}" for name, offer in sorted(least.items()))
    first = min(offered, key=lambda offer: offer.vcpus or 0)
    code = quota_code(family_of(first.pool.type), "spot")
    return QuotaError(
        f"The account's quota of spot vCPUs allows no {first.pool.type} in any region: {regions}.",
        f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
        f"--desired-value {first.vcpus} --region {first.pool.region}",
    )


def _on_demand_quota(account: Account, offered: Sequence[Offer]) -> bool:
    """Whether one of the types may be run on demand, as far as Service Quotas says."""
    for offer in offered:
        try:
            limit = quota(account, offer.pool.region, family_of(offer.pool.type), "on-demand")
        except Refused:
            return True
        if limit is None or limit >= (offer.vcpus or 0):
            return True
    return False
