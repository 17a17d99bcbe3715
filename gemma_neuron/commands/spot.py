"""`spot scan|watch|launch`: what is offered where, followed without buying, and a box taken for a compile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import typer

from gemma_neuron import settings
from gemma_neuron.commands.options import (
    Base,
    BucketOwner,
    Buckets,
    Context,
    Json,
    Slots,
    SourceArg,
    StrategyOption,
    Tp,
)
from gemma_neuron.commands.spot_options import (
    DEFAULT_REGIONS,
    Ami,
    Apply,
    CallTimeout,
    Dtype,
    HubToken,
    InstanceProfile,
    MaxHours,
    MaxPrice,
    MinScore,
    MirrorUri,
    OnDemandAfter,
    Poll,
    Regions,
    Subnets,
    Timeout,
    Toolkit,
    Types,
)
from gemma_neuron.errors import UsageError
from gemma_neuron.render import emit_json, notice

if TYPE_CHECKING:
    from gemma_neuron.pipeline.request import PlanOptions
    from gemma_neuron.pipeline.spot import SpotRequest
    from gemma_neuron.sharding.candidates import StrategyChoice
    from gemma_neuron.spot.account import Account

REGION = re.compile(r"[a-z]{2,3}(-[a-z]+){1,3}-\d")
TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
app = typer.Typer(
    no_args_is_help=True,
    help="Find spot capacity over regions and zones, and take a box for a compile.",
)


@app.command()
def scan(
    regions: Regions = DEFAULT_REGIONS,
    types: Types = "inf2.24xlarge",
    call_timeout: CallTimeout = 60.0,
    as_json: Json = False,
) -> None:
    """Zones, prices, quota and hints of each region. Costs nothing."""
    from gemma_neuron.render.spot import show_scan
    from gemma_neuron.spot.history import History
    from gemma_neuron.spot.scan import scan as look
    from gemma_neuron.spot.stops import require_some_seen

    account, names = account_and_regions(regions, call_timeout)
    found = look(account, names, type_names(types), History())
    require_some_seen(found)
    emit_json(found.to_json()) if as_json else show_scan(found)


@app.command()
def watch(
    regions: Regions = DEFAULT_REGIONS,
    types: Types = "inf2.24xlarge",
    max_price: MaxPrice = None,
    min_score: MinScore = None,
    poll: Poll = 60.0,
    timeout: Timeout = None,
    call_timeout: CallTimeout = 60.0,
    as_json: Json = False,
) -> None:
    """Follow prices, hints and boxes of ours, a line of JSON each; ends when an offer is within --max-price.

    Buys nothing. Whether there is capacity shows in a request only: `spot launch`.
    """
    from gemma_neuron.render.spot import event_line
    from gemma_neuron.spot.history import History
    from gemma_neuron.spot.watch import Watched
    from gemma_neuron.spot.watch import watch as follow

    account, names = account_and_regions(regions, call_timeout)
    wanted = Watched(
        regions=names,
        types=type_names(types),
        cap=max_price,
        min_score=min_score,
        poll=poll,
        timeout=in_seconds(timeout),
    )
    offer = follow(account, History(), wanted, lambda e: event_line(e, to_stderr=as_json))
    if as_json:
        emit_json({"found": offer.to_json()})


@app.command()
def launch(
    source: SourceArg,
    mirror: MirrorUri,
    apply: Apply = False,
    tp: Tp = 8,
    strategy: StrategyOption = "auto",
    dtype: Dtype = None,
    max_context: Context = None,
    slots: Slots = None,
    buckets: Buckets = None,
    base: Base = False,
    bucket_owner: BucketOwner = "",
    regions: Regions = DEFAULT_REGIONS,
    types: Types = "inf2.24xlarge",
    max_price: MaxPrice = None,
    max_hours: MaxHours = 6.0,
    on_demand_after: OnDemandAfter = None,
    poll: Poll = 30.0,
    timeout: Timeout = None,
    instance_profile: InstanceProfile = "gemma-neuron",
    ami: Ami = "",
    subnets: Subnets = "",
    toolkit: Toolkit = "",
    hf_token_parameter: HubToken = "",
    call_timeout: CallTimeout = 60.0,
    as_json: Json = False,
) -> None:
    """Compile on a spot box: waits over regions and zones for one, or adopts the one that runs.

    The box installs the toolkit, runs the same compile with the same mirror, and ends itself. Taken back, the same
    command starts the next, which goes on from the mirror.
    """
    from gemma_neuron.pipeline.spot import SpotRequest, require_reachable
    from gemma_neuron.spot.user_data import TOOLKIT, require_pinned

    given = {
        "tp": str(tp),
        "strategy": None if strategy == "auto" else strategy,
        "dtype": dtype,
        "max-context": max_context,
        "slots": slots,
        "buckets": buckets,
    }
    account, names = account_and_regions(regions, call_timeout)
    request = SpotRequest(
        source=require_reachable(source),
        mirror=mirror,
        plan=plan_options(given, tp, strategy, type_names(types)),
        compile_flags=compile_flags(given, base),
        regions=names,
        types=type_names(types),
        profile=instance_profile,
        toolkit=require_pinned(toolkit or TOOLKIT),
        token_parameter=parameter_name(hf_token_parameter),
        ami=ami,
        subnets=words(subnets),
        bucket_owner=bucket_owner,
        max_price=max_price,
        max_hours=max_hours,
        poll=poll,
        timeout=in_seconds(timeout),
        on_demand_after=in_seconds(on_demand_after),
    )
    run_launch(account, request, apply=apply, as_json=as_json)


def run_launch(account: Account, request: SpotRequest, *, apply: bool, as_json: bool) -> None:
    """Plan, say what it would cost, and with `apply` take a box."""
    from gemma_neuron.pipeline.spot import launch as take
    from gemma_neuron.pipeline.spot import launch_plan
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.spot import event_line, launch_lines, show_launch_plan, taken_fields
    from gemma_neuron.spot.published import require_published

    ready = launch_plan(account, request, Download())
    if not apply:
        emit_json(ready.to_json()) if as_json else show_launch_plan(ready)
        return
    for line in launch_lines(ready):
        notice(line)
    require_published(request.toolkit, notice)
    taken = take(account, request, ready, lambda e: event_line(e, to_stderr=as_json))
    if as_json:
        emit_json(taken_fields(taken, request.job))


def plan_options(
    given: dict[str, str | None], tp: int, strategy: str, types: tuple[str, ...]
) -> PlanOptions:
    """The plan that says whether the model fits, and how large a box's disk must be. Raises SettingsError."""
    from gemma_neuron.pipeline.request import PlanOptions
    from gemma_neuron.pipeline.spot import plan_instance

    return PlanOptions(
        tp=tp,
        instance=plan_instance(types),
        strategy=cast("StrategyChoice", strategy),
        max_context=settings.count(given["max-context"], "--max-context"),
        slots=settings.count(given["slots"], "--slots"),
        buckets=settings.counts(given["buckets"], "--buckets"),
    )


def compile_flags(given: dict[str, str | None], base: bool) -> tuple[str, ...]:
    """Flags of `compile` as typed, those that were given."""
    words = [
        word for name, value in given.items() if value is not None for word in (f"--{name}", value)
    ]
    return (*words, *(("--base",) if base else ()))


def in_seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


def account_and_regions(regions: str, call_timeout: float) -> tuple[Account, tuple[str, ...]]:
    """The account, and the regions named, or all it may use."""
    from gemma_neuron.spot.account import Account
    from gemma_neuron.spot.refusals import Refused, error_for

    names = words(regions)
    account = Account(call_timeout)
    if names == ("all",):
        try:
            return account, account.regions()
        except Refused as refused:
            raise error_for(refused) from refused
    for name in names:
        if not REGION.fullmatch(name):
            raise UsageError(
                f"--regions {name!r} is no AWS region.", f"For example --regions {DEFAULT_REGIONS}."
            )
    if not names:
        raise UsageError("--regions names none.", f"For example --regions {DEFAULT_REGIONS}.")
    return account, names


def type_names(text: str) -> tuple[str, ...]:
    names = words(text)
    for name in names:
        if not TYPE.fullmatch(name):
            raise UsageError(
                f"--types {name!r} is no instance type.", "For example --types inf2.24xlarge."
            )
    if not names:
        raise UsageError("--types names none.", "For example --types inf2.24xlarge.")
    return names


def parameter_name(text: str) -> str:
    """An SSM parameter's name; a token typed in its place would end up in the user data."""
    if text and (
        not re.fullmatch(r"/?[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", text) or text[:3] == "hf_"
    ):
        raise UsageError(
            "--hf-token-parameter takes the name of an SSM parameter, not a token.",
            "aws ssm put-parameter --type SecureString --name /gemma-neuron/hf-token --value …",
        )
    return text


def words(text: str) -> tuple[str, ...]:
    """Comma-separated, each once, in order."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
