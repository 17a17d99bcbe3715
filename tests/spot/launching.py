"""What the tests of `spot launch` share: the command as typed, and what it wrote."""

from __future__ import annotations

import json
from typing import Any

from tests.spot.conftest import SOURCE, client
from tests.spot.ec2 import Ec2

REGIONS = ("us-east-1", "us-east-2", "us-west-2")
JOB_TAG = "gemma-neuron:job"


def launch(mirror: str, *more: object) -> tuple[object, ...]:
    """A launch that buys, patient for at most a minute, with hardly a pause between rounds."""
    timing = ("--poll", "0.05", "--timeout", "1")
    toolkit = f"git+https://example.org/gemma-neuron@{'a' * 40}"  # nobody is asked for it
    return (
        "spot",
        "launch",
        SOURCE,
        "--mirror",
        mirror,
        "--max-context",
        "32k",
        "--apply",
        "--toolkit",
        toolkit,
        *timing,
        *more,
    )


def events(text: str, name: str = "") -> list[dict[str, Any]]:
    """The lines of JSON of a run, all or of one event."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [event for event in found if name in ("", event["event"])]


def boxes(ec2: Ec2, job: str) -> list[dict[str, Any]]:
    """What moto has running for a job, in all regions."""
    filters = [
        {"Name": f"tag:{JOB_TAG}", "Values": [job]},
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
    ]
    return [
        row
        for region in REGIONS
        for reservation in client("ec2", ec2.upstream, region).describe_instances(Filters=filters)[
            "Reservations"
        ]
        for row in reservation["Instances"]
    ]
