"""vCPUs: what a type has, what the account may run, and what it runs. By region and family of types.

Quota codes are the same in every account:
https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemma_neuron.instances import instances
from gemma_neuron.spot.account import Account
from gemma_neuron.spot.offers import Lifecycle
from gemma_neuron.spot.refusals import Refused, asking


@dataclass(frozen=True, slots=True)
class Family:
    """Types that share a quota. `letters`: how their names begin, before the generation's number."""

    name: str
    letters: tuple[str, ...]
    spot: str
    on_demand: str


FAMILIES = (
    Family("inf", ("inf",), "L-B5D1601B", "L-1945791B"),
    Family("trn", ("trn",), "L-6B0D517C", "L-2C3B7624"),
    Family(
        "standard",
        ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"),
        "L-34B43A08",
        "L-1216C47A",
    ),
)
LIVE = ["pending", "running", "stopping", "shutting-down"]
"""States of an instance in which it counts towards the quota."""
MISSING = ("NoSuchResourceException",)


def family_of(type_: str) -> str:
    """The family whose quota a type counts towards; empty for one that no code is known for."""
    found = re.match(r"[a-z]+", type_)
    return next((f.name for f in FAMILIES if found and found[0] in f.letters), "")


def quota_code(family: str, lifecycle: Lifecycle) -> str:
    found = next(f for f in FAMILIES if f.name == family)
    return found.spot if lifecycle == "spot" else found.on_demand


def vcpus_of(account: Account, region: str, type_: str) -> int:
    """vCPUs of a type: from our table, else asked. Raises Refused."""
    known = instances().get(type_)
    if known is not None and known.vcpu is not None:
        return known.vcpu
    with asking(region, f"ec2:DescribeInstanceTypes {type_}"):
        found = account.ec2(region).describe_instance_types(InstanceTypes=[type_])["InstanceTypes"]
        return int(found[0]["VCpuInfo"]["DefaultVCpus"])


def quota(account: Account, region: str, family: str, lifecycle: Lifecycle) -> int | None:
    """vCPUs the account may run at once; None where Service Quotas knows none. Raises Refused."""
    code = quota_code(family, lifecycle)
    client = account.client("service-quotas", region)
    for ask in (client.get_service_quota, client.get_aws_default_service_quota):
        try:
            with asking(region, f"servicequotas:GetServiceQuota {code}"):
                return int(ask(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
        except Refused as refused:
            if refused.code not in MISSING:
                raise
    return None


def spot_quota(account: Account, region: str, family: str) -> int | None:
    return quota(account, region, family, "spot")


def vcpus_running(account: Account, region: str, family: str, lifecycle: Lifecycle = "spot") -> int:
    """vCPUs of the family that run already, ours and others'. Raises Refused."""
    letters = next(f for f in FAMILIES if f.name == family).letters
    filters = [
        {"Name": "instance-state-name", "Values": LIVE},
        {"Name": "instance-type", "Values": [f"{name}*" for name in letters]},
    ]
    if lifecycle == "spot":
        filters.append({"Name": "instance-lifecycle", "Values": ["spot"]})
    total = 0
    with asking(region, "ec2:DescribeInstances"):
        pages = account.ec2(region).get_paginator("describe_instances")
        for page in pages.paginate(Filters=filters):
            for reservation in page["Reservations"]:
                for row in reservation["Instances"]:
                    spot = row.get("InstanceLifecycle") == "spot"
                    if family_of(row["InstanceType"]) == family and spot == (lifecycle == "spot"):
                        total += vcpus_of(account, region, row["InstanceType"])
    return total
