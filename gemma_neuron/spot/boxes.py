"""Boxes of ours, found by their tags wherever they run, so that one that is there is adopted and not doubled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from gemma_neuron.spot.account import Account
from gemma_neuron.spot.history import History
from gemma_neuron.spot.offers import Lifecycle, Pool
from gemma_neuron.spot.refusals import asking

JOB_TAG = "gemma-neuron:job"
RUNNING = ("pending", "running")
ENDED = ("shutting-down", "stopping", "stopped", "terminated")
TAKEN_BACK = "Server.SpotInstance"
"""How EC2's reason begins when it takes a spot instance back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One instance of ours. `reason`: why it ended, in EC2's words, or empty."""

    instance: str
    pool: Pool
    job: str
    lifecycle: Lifecycle
    state: str
    launched: datetime
    reason: str = ""
    ended: datetime | None = None

    @property
    def runs(self) -> bool:
        return self.state in RUNNING

    @property
    def taken_back(self) -> bool:
        return self.reason.startswith(TAKEN_BACK)

    @property
    def minutes(self) -> float:
        """From its launch to its end, or to now."""
        until = self.ended or datetime.now(UTC)
        return max(0.0, (until - self.launched).total_seconds() / 60)

    def __str__(self) -> str:
        return f"{self.instance} ({self.lifecycle}, {self.pool}, {self.state})"

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "region": self.pool.region,
            "zone": self.pool.zone,
            "type": self.pool.type,
            "lifecycle": self.lifecycle,
            "state": self.state,
            "launched": self.launched.isoformat(timespec="seconds"),
            "job": self.job,
            "reason": self.reason or None,
        }


def boxes(account: Account, regions: Iterable[str], job: str | None = None) -> list[Box]:
    """Boxes of a job, or of any, in every state that EC2 still shows; the oldest first. Raises Refused."""
    found = [box for region in sorted(set(regions)) for box in _in_region(account, region, job)]
    return sorted(found, key=lambda box: (box.launched, box.instance))


def running(account: Account, regions: Iterable[str], job: str) -> list[Box]:
    return [box for box in boxes(account, regions, job) if box.runs]


def note_lost(found: Iterable[Box], history: History) -> None:
    """Write down the spot boxes that EC2 took back, and how long each was kept."""
    for box in found:
        if box.taken_back and box.lifecycle == "spot":
            history.add(box.pool, "lost", instance=box.instance, minutes=round(box.minutes, 1))


def terminate(account: Account, box: Box) -> None:
    """Raises Refused."""
    with asking(box.pool.region, f"ec2:TerminateInstances {box.instance}"):
        account.ec2(box.pool.region).terminate_instances(InstanceIds=[box.instance])


def _in_region(account: Account, region: str, job: str | None) -> Sequence[Box]:
    tag: dict[str, Any] = {"Name": "tag-key", "Values": [JOB_TAG]}
    if job is not None:
        tag = {"Name": f"tag:{JOB_TAG}", "Values": [job]}
    with asking(region, "ec2:DescribeInstances"):
        pages = account.ec2(region).get_paginator("describe_instances").paginate(Filters=[tag])
        return [
            _box(region, row)
            for page in pages
            for reservation in page["Reservations"]
            for row in reservation["Instances"]
        ]


def _box(region: str, row: dict[str, Any]) -> Box:
    tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", [])}
    lifecycle = "spot" if row.get("InstanceLifecycle") == "spot" else "on-demand"
    return Box(
        instance=row["InstanceId"],
        pool=Pool(
            region, row.get("Placement", {}).get("AvailabilityZone", ""), row["InstanceType"]
        ),
        job=tags.get(JOB_TAG, ""),
        lifecycle=cast(Lifecycle, lifecycle),
        state=row["State"]["Name"],
        launched=row["LaunchTime"].astimezone(UTC),
        reason=(row.get("StateReason") or {}).get("Code", ""),
        ended=_end(row.get("StateTransitionReason", "")),
    )


def _end(text: str) -> datetime | None:
    """When it ended, from `… (2026-01-31 12:00:00 GMT)`."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", text)
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC) if found else None
