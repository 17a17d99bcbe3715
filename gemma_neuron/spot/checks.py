"""Whether the account lets a box be had: who asks, quota, rights by dry runs, image, profile. Costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from gemma_neuron.backends.base import Check
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.quota import family_of, quota, quota_code, vcpus_of, vcpus_running
from gemma_neuron.spot.refusals import Refused, asking, error_for
from gemma_neuron.spot.template import BoxSpec, Place, look, require_profile

ALLOWED = "DryRunOperation"
NO_TEMPLATE = "lt-00000000000000000"
"""A dry run is judged by rights before what it names is looked up."""


def examine_account(
    account: Account, regions: Sequence[str], types: Sequence[str], profile: str
) -> list[Check]:
    """All checks, in the order a user would fix them. Never raises for what it finds."""
    who = _credentials(account)
    if who.status == "fail":
        return [who]
    arn, checks = _profile(account, profile)
    checks = [who, *checks]
    for region in regions:
        place, image = _place(account, region)
        checks += [
            *(_quota(account, region, type_) for type_ in types),
            image,
            _rights(account, region, types[0], place, arn),
        ]
    return checks


def _credentials(account: Account) -> Check:
    needed = "credentials that AWS accepts"
    try:
        return Check(name="aws credentials", status="ok", found=account.identity(), needed=needed)
    except (Refused, GemmaNeuronError) as error:
        return _failed("aws credentials", error, needed)


def _profile(account: Account, name: str) -> tuple[str, list[Check]]:
    needed = "a role with examples/iam-policy.json"
    try:
        arn = require_profile(account, name)
    except (Refused, GemmaNeuronError) as error:
        return "", [_failed("instance profile", error, needed)]
    return arn, [Check(name="instance profile", status="ok", found=arn, needed=needed)]


def _quota(account: Account, region: str, type_: str) -> Check:
    """Spot first, with the quota on demand beside it; too little is a warning, since other regions may do."""
    name, family = f"quota {region} {type_}", family_of(type_)
    if not family:
        return Check(name=name, status="warn", found="no quota known for this family", needed="")
    try:
        needed = vcpus_of(account, region, type_)
        spot = quota(account, region, family, "spot")
        on_demand = quota(account, region, family, "on-demand")
        used = vcpus_running(account, region, family)
    except Refused as refused:
        found = _failed(name, refused, "vCPUs of the type")
        return replace(found, status="warn")
    enough = spot is None or spot - used >= needed
    return Check(
        name=name,
        status="ok" if enough else "warn",
        found=f"{_vcpus(spot)} spot, {used} in use; {_vcpus(on_demand)} on demand",
        needed=f"{needed} vCPUs",
        remedy=f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
        f"{quota_code(family, 'spot')} --desired-value {needed} --region {region}",
    )


def _vcpus(limit: int | None) -> str:
    return "unknown" if limit is None else str(limit)


def _place(account: Account, region: str) -> tuple[Place | None, Check]:
    name, needed = f"image, subnets {region}", "the public Neuron image and a subnet"
    try:
        place = look(account, region, BoxSpec(job="doctor", root_bytes=0, profile=""))
    except (Refused, GemmaNeuronError) as error:
        return None, _failed(name, error, needed)
    found = f"{place.image}, {len(place.subnets)} zones of {place.vpc}"
    return place, Check(name=name, status="ok", found=found, needed=needed)


def _rights(account: Account, region: str, type_: str, place: Place | None, profile: str) -> Check:
    """Each call that a launch makes, as a dry run: EC2 answers whether it would be allowed, and does nothing."""
    client = account.ec2(region)
    image = place.image if place else "ami-00000000000000000"
    data: dict[str, Any] = {"ImageId": image}
    run = {"ImageId": image, "InstanceType": type_, "MinCount": 1, "MaxCount": 1}
    if profile:
        run["IamInstanceProfile"] = {"Arn": profile}
    spec = {"LaunchTemplateSpecification": {"LaunchTemplateId": NO_TEMPLATE, "Version": "1"}}
    calls: dict[str, Callable[[], Any]] = {
        "ec2:CreateSecurityGroup": lambda: client.create_security_group(
            GroupName="gemma-neuron", Description="gemma-neuron", DryRun=True
        ),
        "ec2:CreateLaunchTemplate": lambda: client.create_launch_template(
            LaunchTemplateName="gemma-neuron-doctor", LaunchTemplateData=data, DryRun=True
        ),
        "ec2:RunInstances": lambda: client.run_instances(**run, DryRun=True),
        "ec2:CreateFleet": lambda: client.create_fleet(
            Type="instant",
            LaunchTemplateConfigs=[spec],
            TargetCapacitySpecification={
                "TotalTargetCapacity": 1,
                "DefaultTargetCapacityType": "spot",
            },
            DryRun=True,
        ),
    }
    results = {right: _dry(region, right, call) for right, call in calls.items()}
    missing = [right for right, code in results.items() if code == "UnauthorizedOperation"]
    unclear = [
        f"{right} ({code})"
        for right, code in results.items()
        if code not in (ALLOWED, "UnauthorizedOperation")
    ]
    status: Literal["ok", "warn", "fail"] = "fail" if missing else "warn" if unclear else "ok"
    found = "allowed in dry runs"
    if missing or unclear:
        found = "; ".join(
            f"{what}: {', '.join(names)}"
            for what, names in (("missing", missing), ("not to be told", unclear))
            if names
        )
    return Check(
        name=f"rights {region}",
        status=status,
        found=found,
        needed=", ".join(calls),
        remedy="Grant the rights of examples/iam-policy-launch.json.",
    )


def _dry(region: str, right: str, call: Callable[[], Any]) -> str:
    """The code that EC2 answers a dry run with."""
    try:
        with asking(region, right):
            call()
    except Refused as refused:
        return refused.code
    except GemmaNeuronError as error:
        return type(error).__name__
    return "no answer"


def _failed(name: str, error: Refused | GemmaNeuronError, needed: str) -> Check:
    shown = error_for(error) if isinstance(error, Refused) else error
    return Check(name=name, status="fail", found=shown.message, needed=needed, remedy=shown.hint)
