"""The account's clients, one a service and region, and small things asked of them."""

from __future__ import annotations

from typing import Any

from gemma_neuron import aws
from gemma_neuron.spot.refusals import asking

GLOBAL_REGION = "us-east-1"
"""Where services without regions of their own answer: IAM, and the price list."""


class Account:
    """Clients that share credentials and the parsed service models.

    `call_seconds`: how long one call may take before its answer counts as lost.
    """

    def __init__(self, call_seconds: float = aws.READ_SECONDS) -> None:
        self._call_seconds = call_seconds
        self._clients: dict[tuple[str, str, bool], Any] = {}
        with aws.configuration_errors("AWS_ENDPOINT_URL_EC2"):
            self._session = aws.session()

    def client(self, service: str, region: str, *, once: bool = False) -> Any:
        """`once`: requests are sent a single time, so that what became of one is known or known to be unknown."""
        key = service, region, once
        if key not in self._clients:
            retries = {"mode": "standard", "total_max_attempts": 1 if once else 4}
            config = aws.config(
                connect_timeout=min(aws.CONNECT_SECONDS, self._call_seconds),
                read_timeout=self._call_seconds,
                retries=retries,
            )
            with aws.configuration_errors("AWS_ENDPOINT_URL_EC2"):
                self._clients[key] = self._session.client(service, region, config=config)
        return self._clients[key]

    def ec2(self, region: str, *, once: bool = False) -> Any:
        return self.client("ec2", region, once=once)

    def identity(self) -> str:
        """The ARN of who asks. Raises Refused."""
        with asking(GLOBAL_REGION, "sts:GetCallerIdentity"):
            return str(self.client("sts", GLOBAL_REGION).get_caller_identity()["Arn"])

    def regions(self) -> tuple[str, ...]:
        """Every region the account may use. Raises Refused."""
        with asking(GLOBAL_REGION, "ec2:DescribeRegions"):
            found = self.ec2(GLOBAL_REGION).describe_regions()["Regions"]
        return tuple(sorted(row["RegionName"] for row in found))
