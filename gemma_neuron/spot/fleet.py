"""One request for one box: EC2 Fleet of type `instant`, whose answer says at once what was had and what was not.

A request carries a token of its own. When its answer is lost, what became of it is found out before anything else is
asked: by the tags of what runs, and by sending the very same request again, which EC2 answers with the first one's
result. https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gemma_neuron.errors import NetworkError
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.boxes import JOB_TAG, Box, running
from gemma_neuron.spot.history import History, Intent
from gemma_neuron.spot.offers import Kind, Lifecycle, Pool
from gemma_neuron.spot.refusals import Refused, asking, kind_of

TRIES = 8
"""Of a request whose answer is lost; the waits between them sum to about two minutes."""
LONGEST_WAIT = 30.0
SETTLE_SECONDS = 60.0
"""How long a box may run before EC2 lists it: listing is eventually consistent, and no bound is documented."""
Say = Callable[[dict[str, Any]], None]
"""One event, a line of JSON."""
Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: any of `pools`, all of one region. `template`: (id, version). `subnets`: zone → subnet.

    `cap`: dollars an hour; EC2 itself refuses a spot price above it.
    """

    job: str
    region: str
    pools: tuple[Pool, ...]
    template: tuple[str, str]
    subnets: dict[str, str]
    lifecycle: Lifecycle = "spot"
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one pool gave nothing."""

    pool: Pool | None
    kind: Kind
    code: str
    said: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: a box, or refusals. `adopted`: the box was found, not handed over."""

    box: Box | None
    refusals: tuple[Refusal, ...]
    adopted: bool = False


class Fleet:
    """Sends requests of one account; `say` is told what is uncertain."""

    def __init__(self, account: Account, history: History, say: Say, sleep: Sleep) -> None:
        self._account, self._history, self._say, self._sleep = account, history, say, sleep

    def ask(self, ask: Ask) -> Answer:
        """Raises Refused for a refusal of the whole request, NetworkError when its fate cannot be found out."""
        token = uuid.uuid4().hex
        request = _request(ask, token)
        client = self._account.ec2(ask.region, once=True)
        self._history.begin(
            Intent(job=ask.job, region=ask.region, token=token, sent=datetime.now(UTC).timestamp())
        )
        wait = 1.0
        for attempt in range(TRIES):
            try:
                with asking(ask.region, "ec2:CreateFleet"):
                    answer = client.create_fleet(**request)
            except Refused as refused:
                lost = refused.kind == "unknown" or (refused.kind == "throttling" and attempt > 0)
                if not lost:
                    self._history.done(ask.job)
                    raise
                self._say_lost(ask, refused, attempt)
                found = self._look(ask)
                if found is not None:
                    self._history.done(ask.job)
                    return Answer(found, (), adopted=True)
                self._sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            self._history.done(ask.job)
            return _answer(ask, answer)
        raise NetworkError(
            f"{ask.region}: EC2 did not say what became of a request for a box, asked {TRIES} times.",
            "Run the same command: it looks for that box before it asks for another.",
        )

    def settle(self, job: str) -> Box | None:
        """The box of a request that an earlier process left without its answer; waits until EC2 would list it."""
        intent = self._history.under_way(job)
        while intent is not None:
            found = running(self._account, [intent.region], job)
            left = intent.sent + SETTLE_SECONDS - datetime.now(UTC).timestamp()
            if found or not 0 < left <= SETTLE_SECONDS:
                self._history.done(job)
                return found[0] if found else None
            self._say(
                {
                    "event": "looking",
                    "region": intent.region,
                    "why": "an earlier request",
                    "seconds": round(left),
                }
            )
            self._sleep(min(2.0, left))
        return None

    def _look(self, ask: Ask) -> Box | None:
        try:
            found = running(self._account, [ask.region], ask.job)
        except Refused:
            return None
        return found[0] if found else None

    def _say_lost(self, ask: Ask, refused: Refused, attempt: int) -> None:
        self._say(
            {
                "event": "answer-lost",
                "region": ask.region,
                "attempt": attempt + 1,
                "code": refused.code,
                "message": refused.said,
            }
        )


def _request(ask: Ask, token: str) -> dict[str, Any]:
    overrides = []
    for priority, pool in enumerate(ask.pools):
        override: dict[str, Any] = {
            "InstanceType": pool.type,
            "SubnetId": ask.subnets[pool.zone],
        }
        if ask.lifecycle == "spot" and ask.cap is not None:
            override["MaxPrice"] = f"{ask.cap:.6f}"
        if ask.lifecycle == "on-demand":
            override["Priority"] = float(priority)
        overrides.append(override)
    template, version = ask.template
    request: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": version},
                "Overrides": overrides,
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": 1,
            "DefaultTargetCapacityType": ask.lifecycle,
        },
        # instance and volume are tagged by the launch template
        "TagSpecifications": [
            {"ResourceType": "fleet", "Tags": [{"Key": JOB_TAG, "Value": ask.job}]}
        ],
    }
    if ask.lifecycle == "spot":
        request["SpotOptions"] = {"AllocationStrategy": "price-capacity-optimized"}
    else:
        request["OnDemandOptions"] = {"AllocationStrategy": "prioritized"}
    return request


def _answer(ask: Ask, answer: dict[str, Any]) -> Answer:
    zones = {subnet: zone for zone, subnet in ask.subnets.items()}

    def pool_of(row: dict[str, Any]) -> Pool | None:
        override = row.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        zone = override.get("AvailabilityZone") or zones.get(override.get("SubnetId", ""), "")
        type_ = row.get("InstanceType") or override.get("InstanceType", "")
        return Pool(ask.region, zone, type_) if zone and type_ else None

    refusals = tuple(
        Refusal(
            pool_of(row), kind_of(row["ErrorCode"]), row["ErrorCode"], row.get("ErrorMessage", "")
        )
        for row in answer.get("Errors", [])
    )
    for row in answer.get("Instances", []):
        for instance in row.get("InstanceIds", []):
            pool = pool_of(row) or ask.pools[0]
            box = Box(
                instance=instance,
                pool=pool,
                job=ask.job,
                lifecycle=ask.lifecycle,
                state="pending",
                launched=datetime.now(UTC),
            )
            return Answer(box, refusals)
    return Answer(None, refusals)


def summary(refusals: Sequence[Refusal]) -> dict[str, int]:
    """Error code → how many pools it came from."""
    found: dict[str, int] = {}
    for refusal in refusals:
        found[refusal.code] = found.get(refusal.code, 0) + 1
    return found
