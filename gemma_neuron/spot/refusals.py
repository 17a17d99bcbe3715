"""What EC2's refusals mean: which of them wait, which end a region's pool, which stop everything.

In: an error code of EC2, EC2 Fleet, Service Quotas, SSM or IAM. Out: its kind, and the error to raise for it. Codes:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import botocore.exceptions as failures

from gemma_neuron import aws
from gemma_neuron.errors import (
    AccessError,
    CloudSetupError,
    GemmaNeuronError,
    NetworkError,
    QuotaError,
)
from gemma_neuron.spot.offers import Kind

CODES: dict[Kind, tuple[str, ...]] = {
    "capacity": (
        "InsufficientInstanceCapacity", "UnfulfillableCapacity", "InsufficientCapacity", "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity", "CapacityNotAvailable",
    ),
    "price": ("SpotMaxPriceTooLow", "MaxPriceTooLow"),
    "pool": ("Unsupported", "UnsupportedOperation", "InsufficientFreeAddressesInSubnet"),
    "quota": (
        "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "SpotInstanceCountExceeded",
        "MaxFleetCountExceeded", "MaxSpotFleetRequestCountExceeded", "TargetCapacityLimitExceeded",
        "TargetCapacityLimitExceededException", "VolumeLimitExceeded", "MaxIOPSLimitExceeded",
        "ResourceCountLimitExceeded",
    ),
    "authorisation": (
        "UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "OptInRequired", "PendingVerification",
        "Blocked", "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    ),
    "throttling": (
        "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
        "RequestThrottled", "RequestThrottledException", "BandwidthLimitExceeded", "EC2ThrottledException",
    ),
    "unknown": (
        "InternalError", "InternalFailure", "Unavailable", "ServiceUnavailable", "ServerInternal", "RequestTimeout",
        "500", "502", "503", "504",
    ),
    "settling": (
        "InvalidGroup.NotFound", "InvalidGroup.Duplicate", "InvalidLaunchTemplateId.NotFound",
        "InvalidLaunchTemplateId.VersionNotFound", "InvalidLaunchTemplateName.AlreadyExistsException",
    ),
}  # fmt: skip
WAITED_OUT = ("capacity", "price", "throttling", "unknown", "settling")
"""Kinds that another try may cure."""


class Refused(Exception):
    """A service said no, or nothing. `doing`: what was asked, in words."""

    def __init__(self, kind: Kind, code: str, said: str, *, region: str, doing: str) -> None:
        super().__init__(f"{region}: {doing}: {code}: {said}")
        self.kind, self.code, self.said = kind, code, said
        self.region, self.doing = region, doing


def kind_of(code: str) -> Kind:
    """`setup` for a code that is in no list: it names something wrong, and is shown as it came."""
    if code in aws.BAD_CREDENTIALS:
        return "credentials"
    return next((kind for kind, codes in CODES.items() if code in codes), "setup")


@contextmanager
def asking(region: str, doing: str) -> Iterator[None]:
    """A service's errors become Refused; no credentials at all, AccessError."""
    try:
        yield
    except aws.NO_CREDENTIALS as error:
        raise aws.no_credentials(error) from error
    except failures.ClientError as error:
        code, said = aws.error_code(error), aws.error_text(error)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = kind_of(code)
        if kind == "setup" and status >= 500:
            kind = "unknown"
        raise Refused(kind, code, said, region=region, doing=doing) from error
    except aws.LOST as error:
        name = type(error).__name__
        raise Refused("unknown", name, str(error)[:300], region=region, doing=doing) from error
    except failures.BotoCoreError as error:
        raise AccessError(
            f"{region}: {doing} cannot be asked: {type(error).__name__}: {error}",
            "Check AWS_REGION, AWS_ENDPOINT_URL and the profile.",
        ) from error


def error_for(refused: Refused) -> GemmaNeuronError:
    """What a refusal that is not waited out ends the command with."""
    where = f"{refused.region}: {refused.doing}"
    said = f"{refused.code}: {_plain(refused.said)}"
    others = "or leave that region out with --regions"
    if refused.kind == "quota":
        return QuotaError(f"{where} is over the account's quota ({said}).", _more_quota(refused))
    if refused.kind == "credentials":
        return AccessError(f"{where}: AWS does not accept these credentials ({said}).", aws.RENEW)
    if refused.kind == "authorisation":
        if "ServiceLinkedRole" in refused.code:
            hint = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        elif refused.code == "OptInRequired":
            hint = f"Enable the region in the account's settings, {others}."
        else:
            hint = f"Grant the rights of examples/iam-policy-launch.json, {others}."
        return AccessError(f"{where} is not allowed ({said}).", hint)
    if refused.kind in ("throttling", "unknown"):
        return NetworkError(
            f"{where} got no answer to go by ({said}).", "Run the same command later."
        )
    return CloudSetupError(f"{where} was refused ({said}).", "Check what the message names.")


def _plain(said: str) -> str:
    """Without the encoded message that only its own account's administrator can read."""
    return said.partition("Encoded authorization failure message")[0].strip().rstrip(".")


def _more_quota(refused: Refused) -> str:
    return (
        "Ask for more: aws service-quotas request-service-quota-increase --service-code ec2 (`doctor --aws` names the "
        f"quota) --region {refused.region}; or leave that region out with --regions."
    )
