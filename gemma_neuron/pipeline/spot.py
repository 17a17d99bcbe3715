"""A compile taken to a spot box: planned, priced, and only then asked for. Also `scan`, `watch` and `doctor --aws`.

The plan says whether the model fits and how large the root volume must be; the mirror's bucket says which region is
near; the spot stage buys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.artifacts import digest_json
from gemma_neuron.errors import UsageError
from gemma_neuron.instances import DEFAULT_INSTANCE, instances
from gemma_neuron.pipeline.request import PlanOptions
from gemma_neuron.pipeline.sources import Watch

if TYPE_CHECKING:
    from gemma_neuron.sharding.candidates import Planned
    from gemma_neuron.spot.account import Account
    from gemma_neuron.spot.boxes import Box
    from gemma_neuron.spot.offers import Offer, Scan
    from gemma_neuron.spot.poller import Taken
    from gemma_neuron.spot.template import Place

Say = Callable[[dict[str, Any]], None]
TOOLKIT_BYTES, SCRATCH_BYTES = 20 * 10**9, 30 * 10**9
"""On the root volume beside image and port: torch and SDK, and what compilers write while they work."""
SLACK = 1.15
"""On what the plan counts: the checkpoint has towers and files the port lacks."""
START_MINUTES = 15.0
"""Assumed, from launch to the first tensor: boot and install."""
MOVED_BYTES_S = 200e6
"""Assumed rate of checkpoint and rank files, over network and disk."""
OUT = "/opt/port"
"""The port's folder on a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotRequest:
    """What `spot launch` was asked. `compile_flags`: flags of `compile`, as typed, in a fixed order.

    `max_price`: dollars an hour. `poll`, `timeout`, `on_demand_after`, `call_seconds`: seconds; None: never.
    """

    source: str
    mirror: str
    plan: PlanOptions
    compile_flags: tuple[str, ...]
    regions: tuple[str, ...]
    types: tuple[str, ...]
    profile: str
    toolkit: str
    token_parameter: str = ""
    ami: str = ""
    subnets: tuple[str, ...] = ()
    bucket_owner: str = ""
    max_price: float | None = None
    max_hours: float = 6.0
    poll: float = 30.0
    timeout: float | None = None
    on_demand_after: float | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """What each box runs, the same that a user would type there."""
        flags = ("--out", OUT, "--backend", "neuron", *self.compile_flags, "--mirror", self.mirror)
        owner = ("--bucket-owner", self.bucket_owner) if self.bucket_owner else ()
        return ("compile", self.source, *flags, *owner)

    @property
    def job(self) -> str:
        """The same for the same work, so that its boxes are found again."""
        return digest_json(list(self.command))[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """All that is known before anything is bought. `place`: of the best region that has one.

    `left_out`: better regions that have none, and why.
    """

    request: SpotRequest
    planned: Planned
    scan: Scan
    boxes: tuple[Box, ...]
    place: Place | None
    left_out: dict[str, str]
    root_bytes: int
    bucket_region: str
    on_demand: dict[str, float | None]
    user_data: str

    @property
    def port_bytes(self) -> int:
        """Rank files of all ranks."""
        chosen = self.planned.chosen
        return int(chosen.plan.tp * chosen.bytes.weights)

    @property
    def checkpoint_bytes(self) -> int:
        from gemma_neuron.sharding.memory import parameter_count

        return 2 * parameter_count(self.planned.chosen.plan)

    @property
    def hours(self) -> float:
        """Expected, where nothing was mirrored yet: the nearest published compile, start and moving assumed."""
        moving = (self.checkpoint_bytes + self.port_bytes) / MOVED_BYTES_S / 60
        return (START_MINUTES + moving + self.planned.compile_time.run.minutes) / 60

    def cross_region_bytes(self, region: str) -> int:
        """About what crosses a region's border: checkpoint and rank files, each pulled or pushed once."""
        if region == self.bucket_region:
            return 0
        return self.checkpoint_bytes + self.port_bytes

    @property
    def candidates(self) -> tuple[Offer, ...]:
        """Offers that would be asked for, best first."""
        cap = self.request.max_price
        return tuple(offer for offer in self.scan.offers if not offer.obstacle(cap))

    def to_json(self) -> dict[str, Any]:
        """`spot launch --json` without --apply."""
        request = self.request
        return {
            "applied": False,
            "job": request.job,
            "command": ["gemma-neuron", *request.command],
            "toolkit": request.toolkit,
            "boxes": [box.to_json() for box in self.boxes],
            **self.scan.to_json(),
            "candidates": [offer.pool.zone for offer in self.candidates],
            "max_price": request.max_price,
            "max_hours": request.max_hours,
            "expected_hours": round(self.hours, 2),
            "on_demand_price": self.on_demand,
            "bucket_region": self.bucket_region,
            "cross_region_bytes": {
                region: self.cross_region_bytes(region) for region in request.regions
            },
            "root_bytes": self.root_bytes,
            "place": None if self.place is None else self.place.to_json(),
            "left_out": self.left_out,
            "instance_profile": request.profile,
            "user_data": self.user_data,
        }


def require_reachable(source: str) -> str:
    """A source that a box can read too. Raises UsageError for a folder of this machine."""
    from gemma_neuron.checkpoint.source import HUB_ID

    if source.startswith("s3://") or (HUB_ID.fullmatch(source) and not Path(source).exists()):
        return source
    raise UsageError(
        f"{source} is a folder of this machine, which a box cannot read.",
        "Name a hub id (org/name@revision), or copy it to S3 and name s3://bucket/prefix.",
    )


def launch_plan(account: Account, request: SpotRequest, watch: Watch) -> LaunchPlan:
    """Everything that can be found out for nothing. Raises what would stop a launch.

    PlanError when the model does not fit, AccessError for bucket or rights, CloudSetupError, QuotaError.
    """
    from gemma_neuron.pipeline import planned
    from gemma_neuron.spot.boxes import boxes, note_lost
    from gemma_neuron.spot.history import History
    from gemma_neuron.spot.refusals import Refused, error_for
    from gemma_neuron.spot.scan import scan
    from gemma_neuron.spot.stops import require_hope
    from gemma_neuron.spot.template import first_place, require_profile
    from gemma_neuron.spot.user_data import script

    plan = planned(request.source, request.plan, watch)
    bucket = bucket_region(request.mirror, request.bucket_owner)
    history = History()
    seen = scan(account, request.regions, request.types, history)
    require_hope(account, seen, on_demand=request.on_demand_after is not None)
    try:
        require_profile(account, request.profile)
        there = boxes(account, {*request.regions, *history.regions_of_boxes()}, request.job)
        note_lost(there, history)
        offering = dict.fromkeys(offer.pool.region for offer in seen.offers if offer.offered)
        root = root_bytes(plan)
        place, left_out = first_place(account, offering, box_spec(request, root))
    except Refused as refused:
        raise error_for(refused) from refused
    return LaunchPlan(
        request=request,
        planned=plan,
        scan=seen,
        boxes=tuple(box for box in there if box.runs),
        place=place,
        left_out=left_out,
        root_bytes=root,
        bucket_region=bucket,
        on_demand=_on_demand(account, request, seen),
        user_data=script(box_job(request), request.regions[0] if place is None else place.region),
    )


def launch(
    account: Account, request: SpotRequest, ready: LaunchPlan, say: Say, **timing: Any
) -> Taken:
    """Take a box: the job's own that runs, or the first to be had. This buys.

    `timing`: the poller's clock and sleep.
    """
    from gemma_neuron.spot.history import History
    from gemma_neuron.spot.poller import Poller, Wanted
    from gemma_neuron.spot.refusals import Refused, error_for
    from gemma_neuron.spot.template import require_profile
    from gemma_neuron.spot.user_data import script

    job, history = box_job(request), History()
    try:
        profile = require_profile(account, request.profile)
    except Refused as refused:
        raise error_for(refused) from refused
    wanted = Wanted(
        spec=box_spec(request, ready.root_bytes),
        regions=request.regions,
        types=request.types,
        profile=profile,
        user_data=lambda region: script(job, region),
        cap=request.max_price,
        poll=request.poll,
        timeout=request.timeout,
        on_demand_after=request.on_demand_after,
    )
    with history.only_launcher(request.job):
        return Poller(account, history, wanted, say, **timing).take(ready.scan)


def box_job(request: SpotRequest) -> Any:
    """What the box is told to do."""
    from gemma_neuron.spot.user_data import Job, require_pinned

    return Job(
        id=request.job,
        command=request.command,
        report=f"{request.mirror.rstrip('/')}/boxes/{request.job}",
        max_hours=request.max_hours,
        toolkit=require_pinned(request.toolkit),
        token_parameter=request.token_parameter,
    )


def box_spec(request: SpotRequest, root: int) -> Any:
    from gemma_neuron.spot.template import BoxSpec

    return BoxSpec(
        job=request.job,
        root_bytes=root,
        profile=request.profile,
        ami=request.ami,
        subnets=request.subnets,
    )


def root_bytes(plan: Planned) -> int:
    """What the root volume must hold beside the image."""
    from gemma_neuron.sharding.memory import parameter_count

    chosen = plan.chosen
    port = chosen.plan.tp * chosen.bytes.weights + 2 * parameter_count(chosen.plan)
    return int(SLACK * port) + TOOLKIT_BYTES + SCRATCH_BYTES


def plan_instance(types: Sequence[str]) -> str:
    """The instance a plan is made for: the smallest of the table's among the types, else the default."""
    known = [instances()[name] for name in types if name in instances()]
    return min(known, key=lambda row: row.cores).name if known else DEFAULT_INSTANCE


def bucket_region(uri: str, bucket_owner: str) -> str:
    """Where the mirror's bucket lies. Raises AccessError or NetworkError."""
    from gemma_neuron.mirror.location import S3Location
    from gemma_neuron.mirror.store import Store

    store = Store(S3Location.parse(uri), bucket_owner)
    return store.bucket_region()


def _on_demand(account: Account, request: SpotRequest, seen: Scan) -> dict[str, float | None]:
    """Region and type → dollars an hour on demand, where that may be bought."""
    from gemma_neuron.spot.prices import on_demand_price

    if request.on_demand_after is None:
        return {}
    pools = sorted({(o.pool.region, o.pool.type) for o in seen.offers if o.offered})
    return {f"{region} {type_}": on_demand_price(account, region, type_) for region, type_ in pools}
