"""What a box is: image, subnets, security group without inbound rules, launch template.

`look` reads what the account has and costs nothing; `make` creates what is missing: a security group and a launch
template, which are free as well. Nothing of the account is changed that does not carry our name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma_neuron import __version__
from gemma_neuron.errors import CloudSetupError
from gemma_neuron.spot.account import GLOBAL_REGION, Account
from gemma_neuron.spot.boxes import JOB_TAG
from gemma_neuron.spot.refusals import Refused, asking

IMAGE_PARAMETER = "/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id"
"""The Neuron DLAMI for torch 2.9, whose last publication carries SDK 2.31, the last with ModelBuilder:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/deploy/environments/dlami.html"""
GROUP_NAME = "gemma-neuron"
ROOT_MIB_S, ROOT_IOPS = 500, 3000
"""Of the root volume (gp3): rank files and checkpoint are read and written at the disk's rate."""
GIB = 2**30


class NoPlaceError(CloudSetupError):
    """A region has nothing that a box could be put into; another may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """What is asked of every region. `ami`: instead of the public parameter. `root_bytes`: for the job, image aside."""

    job: str
    root_bytes: int
    profile: str
    ami: str = ""
    subnets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a region has for a box. `subnets`: zone → subnet."""

    region: str
    image: str
    root_device: str
    root_gib: int
    vpc: str
    subnets: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "image": self.image,
            "root_gib": self.root_gib,
            "vpc": self.vpc,
            "subnets": dict(self.subnets),
        }


def require_profile(account: Account, name: str) -> str:
    """The instance profile's ARN. Raises CloudSetupError when there is none, Refused otherwise."""
    try:
        with asking(GLOBAL_REGION, f"iam:GetInstanceProfile {name}"):
            found = account.client("iam", GLOBAL_REGION).get_instance_profile(
                InstanceProfileName=name
            )["InstanceProfile"]
    except Refused as refused:
        if refused.code != "NoSuchEntity":
            raise
        raise CloudSetupError(
            f"The account has no instance profile {name!r}: a box would have no right to the mirror.",
            "Make a role for EC2 with the rights of examples/iam-policy.json, or name one: --instance-profile.",
        ) from refused
    if not found.get("Roles"):
        raise CloudSetupError(
            f"The instance profile {name!r} has no role.",
            "Add one with the rights of examples/iam-policy.json.",
        )
    return str(found["Arn"])


def first_place(
    account: Account, regions: Iterable[str], spec: BoxSpec
) -> tuple[Place | None, dict[str, str]]:
    """The first region's place that has one, and why those before it have none. Raises NoPlaceError when none has."""
    left_out: dict[str, NoPlaceError] = {}
    for region in regions:
        try:
            return look(account, region, spec), {name: e.message for name, e in left_out.items()}
        except NoPlaceError as error:
            left_out[region] = error
    if left_out:
        raise next(iter(left_out.values()))
    return None, {}


def look(account: Account, region: str, spec: BoxSpec) -> Place:
    """Image and subnets of a region. Raises NoPlaceError or Refused."""
    image = spec.ami or _public_image(account, region)
    device, image_gib = _root_of(account, region, image)
    vpc, subnets = _subnets(account, region, spec.subnets)
    return Place(
        region=region,
        image=image,
        root_device=device,
        root_gib=image_gib + -(-spec.root_bytes // GIB),
        vpc=vpc,
        subnets=subnets,
    )


def template_data(
    place: Place, spec: BoxSpec, profile: str, user_data: str, group: str
) -> dict[str, Any]:
    """The launch template: everything but type, zone and price, which the request names."""
    tags = [
        {"Key": "Name", "Value": f"gemma-neuron {spec.job}"},
        {"Key": JOB_TAG, "Value": spec.job},
        {"Key": "gemma-neuron:toolkit", "Value": __version__},
    ]
    root = {
        "VolumeSize": place.root_gib,
        "VolumeType": "gp3",
        "Iops": ROOT_IOPS,
        "Throughput": ROOT_MIB_S,
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    return {
        "ImageId": place.image,
        "IamInstanceProfile": {"Arn": profile},
        "SecurityGroupIds": [group],
        "BlockDeviceMappings": [{"DeviceName": place.root_device, "Ebs": root}],
        # version 2 only, and no farther than the box itself: a container on it gets no credentials
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
        ],
    }  # fmt: skip


def make(
    account: Account, place: Place, spec: BoxSpec, profile: str, user_data: str
) -> tuple[str, str]:
    """The launch template of the job in a region, made or brought up to date: (id, version). Raises Refused."""
    group = _group(account, place)
    data = template_data(place, spec, profile, user_data, group)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]
    name = f"gemma-neuron-{spec.job}"
    client = account.ec2(place.region)
    found = _template(account, place.region, name)
    if found is None:
        with asking(place.region, "ec2:CreateLaunchTemplate"):
            made = client.create_launch_template(
                LaunchTemplateName=name,
                VersionDescription=digest,
                LaunchTemplateData=data,
                ClientToken=f"{spec.job}-{digest}",
                TagSpecifications=[
                    {
                        "ResourceType": "launch-template",
                        "Tags": [{"Key": JOB_TAG, "Value": spec.job}],
                    }
                ],
            )["LaunchTemplate"]
        return str(made["LaunchTemplateId"]), str(made["LatestVersionNumber"])
    with asking(place.region, "ec2:DescribeLaunchTemplateVersions"):
        versions = client.describe_launch_template_versions(
            LaunchTemplateId=found, Versions=["$Latest"]
        )["LaunchTemplateVersions"]
    if versions and versions[0].get("VersionDescription") == digest:
        return found, str(versions[0]["VersionNumber"])
    with asking(place.region, "ec2:CreateLaunchTemplateVersion"):
        made = client.create_launch_template_version(
            LaunchTemplateId=found, VersionDescription=digest, LaunchTemplateData=data
        )["LaunchTemplateVersion"]
    return found, str(made["VersionNumber"])


def _public_image(account: Account, region: str) -> str:
    try:
        with asking(region, f"ssm:GetParameter {IMAGE_PARAMETER}"):
            found = account.client("ssm", region).get_parameter(Name=IMAGE_PARAMETER)
            return str(found["Parameter"]["Value"])
    except Refused as refused:
        if refused.code != "ParameterNotFound":
            raise
        raise NoPlaceError(
            f"{region} has no public image {IMAGE_PARAMETER}.",
            "Name an image: --ami, or leave the region out with --regions.",
        ) from refused


def _root_of(account: Account, region: str, image: str) -> tuple[str, int]:
    """The root device's name and the GiB of its snapshot."""
    try:
        with asking(region, f"ec2:DescribeImages {image}"):
            found = account.ec2(region).describe_images(ImageIds=[image])["Images"]
    except Refused as refused:
        if not refused.code.startswith("InvalidAMIID"):
            raise
        found = []
    if not found:
        raise NoPlaceError(
            f"{region} has no image {image}: images belong to one region.",
            "Name that region alone: --regions, or leave --ami out for the public Neuron image.",
        )
    row = found[0]
    if row.get("Architecture", "x86_64") != "x86_64":
        raise NoPlaceError(
            f"{image} is for {row['Architecture']}; Inferentia2 instances are x86_64.",
            "Name another --ami.",
        )
    device = str(row.get("RootDeviceName") or "/dev/sda1")
    sizes = [
        int(mapping["Ebs"].get("VolumeSize", 0))
        for mapping in row.get("BlockDeviceMappings", [])
        if mapping.get("DeviceName") == device and "Ebs" in mapping
    ]
    return device, max([*sizes, 8])


def _subnets(account: Account, region: str, named: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(VPC, zone → subnet): the named ones that lie in the region, else the default VPC's."""
    filters: list[dict[str, Any]] = [{"Name": "default-for-az", "Values": ["true"]}]
    if named:
        filters = [{"Name": "subnet-id", "Values": list(named)}]
    with asking(region, "ec2:DescribeSubnets"):
        rows = account.ec2(region).describe_subnets(Filters=filters)["Subnets"]
    rows.sort(key=lambda row: (-row.get("AvailableIpAddressCount", 0), row["SubnetId"]))
    if not rows:
        what = f"none of the subnets {', '.join(named)}" if named else "no default subnet"
        raise NoPlaceError(
            f"{region} has {what}.",
            "aws ec2 create-default-vpc, name subnets that reach the internet (--subnets), or leave it out.",
        )
    vpcs = sorted({row["VpcId"] for row in rows})
    if len(vpcs) > 1:
        raise NoPlaceError(
            f"{region}: the subnets {', '.join(named)} lie in {len(vpcs)} VPCs.",
            "Name those of one.",
        )
    found: dict[str, str] = {}
    for row in rows:
        found.setdefault(row["AvailabilityZone"], row["SubnetId"])
    return vpcs[0], found


def _group(account: Account, place: Place) -> str:
    """Our security group of the VPC: nobody reaches a box, the box reaches out. Raises CloudSetupError or Refused."""
    client = account.ec2(place.region)
    filters = [
        {"Name": "vpc-id", "Values": [place.vpc]},
        {"Name": "group-name", "Values": [GROUP_NAME]},
    ]
    with asking(place.region, "ec2:DescribeSecurityGroups"):
        found = client.describe_security_groups(Filters=filters)["SecurityGroups"]
    if not found:
        with asking(place.region, "ec2:CreateSecurityGroup"):
            made = client.create_security_group(
                GroupName=GROUP_NAME,
                VpcId=place.vpc,
                Description="gemma-neuron boxes: no inbound rule",
            )
        return str(made["GroupId"])
    group = found[0]
    if group.get("IpPermissions"):
        raise CloudSetupError(
            f"{place.region}: the security group {GROUP_NAME} ({group['GroupId']}) has inbound rules; boxes take none.",
            "Remove them: aws ec2 revoke-security-group-ingress.",
        )
    return str(group["GroupId"])


def _template(account: Account, region: str, name: str) -> str | None:
    try:
        with asking(region, "ec2:DescribeLaunchTemplates"):
            found = account.ec2(region).describe_launch_templates(LaunchTemplateNames=[name])
            return str(found["LaunchTemplates"][0]["LaunchTemplateId"])
    except Refused as refused:
        if refused.code not in ("InvalidLaunchTemplateName.NotFoundException",):
            raise
        return None
