"""The wait for a box, in this process by the command line's own `main`: which pools are asked, and what ends it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemma_neuron.spot.poller import MOST_UNSETTLED
from tests.cli_process import Ended, run_main
from tests.spot.conftest import client
from tests.spot.ec2 import Ec2
from tests.spot.launching import boxes, events, launch

pytestmark = pytest.mark.usefixtures("here")
Capsys = pytest.CaptureFixture[str]


def had(capsys: Capsys, *arguments: object) -> dict[str, object]:
    """The last event of a launch that succeeds."""
    found = run_main(capsys, *arguments)
    assert found.code == 0, found.err
    return events(found.out)[-1]


def ends(capsys: Capsys, code: int, *arguments: object) -> Ended:
    found = run_main(capsys, *arguments)
    assert found.code == code, (found.out, found.err)
    assert found.err.count("error: ") == 1 and "hint: " in found.err
    return found


@pytest.mark.fault("spot-06-codes")
@pytest.mark.fault("spot-07-az-fallback")
def test_without_capacity_in_one_zone_the_next_is_tried(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.capacity = {"us-east-1b"}
    ec2.refusal = {"us-east-2a": "UnfulfillableCapacity", "us-east-2b": "SpotMaxPriceTooLow"}
    assert had(capsys, *launch(mirror))["zone"] == "us-east-1b"
    assert [fleet["region"] for fleet in ec2.fleets] == ["us-east-2", "us-east-1"]


@pytest.mark.fault("spot-09-az-unsupported")
def test_a_zone_that_does_not_offer_or_support_the_type_is_left_out(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.appears = (3, "us-east-1b")
    ec2.refusal = {"us-east-1a": "Unsupported"}
    assert had(capsys, *launch(mirror, "--regions", "us-east-1"))["zone"] == "us-east-1b"
    first, *later = ({pool["zone"] for pool in fleet["pools"]} for fleet in ec2.fleets)
    assert first == {"us-east-1a", "us-east-1b", "us-east-1c", "us-east-1f"}  # not offered: d, e
    assert later and all(zones == first - {"us-east-1a"} for zones in later)


def test_a_region_without_a_place_for_a_box_is_left_out(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.bare, ec2.capacity = {"us-east-2"}, {"us-east-1b"}
    plan = run_main(capsys, *[a for a in launch(mirror) if a != "--apply"])
    assert plan.code == 0 and "left out: us-east-2 has no default subnet." in plan.out
    found = run_main(capsys, *launch(mirror))
    assert found.code == 0, found.err
    (left_out,) = events(found.out, "left-out")
    assert left_out["region"] == "us-east-2" and "default subnet" in left_out["why"]
    assert events(found.out)[-1]["zone"] == "us-east-1b"
    ec2.bare, ec2.fleets = {"us-east-1", "us-east-2", "us-west-2"}, []
    asked = launch(f"{mirror}/another")
    for arguments in ([a for a in asked if a != "--apply"], asked):
        assert "has no default subnet" in ends(capsys, 8, *arguments).err
    assert not ec2.fleets


def test_what_was_made_a_moment_ago_may_not_be_seen_yet(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.capacity = {"us-east-2a"}
    ec2.whole = {"us-east-2": ["InvalidLaunchTemplateId.NotFound", "InvalidGroup.NotFound"]}
    here = ("--regions", "us-east-2")
    assert had(capsys, *launch(mirror, *here))["zone"] == "us-east-2a"
    assert len(ec2.fleets) == 3


def test_what_was_made_and_stays_away_ends_the_wait(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.refusal = {f"us-east-2{z}": "InvalidGroup.NotFound" for z in "abc"}
    said = ends(capsys, 8, *launch(mirror, "--regions", "us-east-2", "--poll", "0.01"))
    assert "InvalidGroup.NotFound" in said.err
    assert len(ec2.fleets) == MOST_UNSETTLED + 1


def test_no_zone_left_is_exit_9(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.refusal = {f"us-east-2{z}": "Unsupported" for z in "abc"}
    found = ends(capsys, 9, *launch(mirror, "--regions", "us-east-2"))
    assert "supports inf2.24xlarge" in found.err
    assert len(ec2.fleets) == 1


def test_no_capacity_within_the_time_is_exit_9(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    found = ends(capsys, 9, *launch(mirror, "--timeout", "0"))
    assert "asked in 1 rounds" in found.err
    assert not ec2.launches


def test_throttling_is_waited_out(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.whole = {"us-east-2": ["RequestLimitExceeded"] * 2}
    ec2.appears = (2, "us-east-2a")
    assert had(capsys, *launch(mirror))["zone"] == "us-east-2a"
    # it was asked less often than the others meanwhile
    assert ec2.times_asked("us-east-2") < ec2.times_asked("us-east-1")


@pytest.mark.fault("spot-08-double-launch")
@pytest.mark.parametrize("hidden", [0, 3])
def test_an_answer_that_is_cut_is_asked_for_again_by_the_same_token(
    capsys: Capsys, ec2: Ec2, mirror: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden: EC2 does not list the box yet, so only the token can tell."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ec2.capacity, ec2.lose = {"us-east-2c"}, 1
    ec2.hidden = hidden and 9 + hidden  # three looks at quota, twice three at boxes come before
    found = run_main(capsys, *launch(mirror))
    assert found.code == 0, found.err
    last = events(found.out)[-1]
    assert last["event"] == ("launched" if hidden else "adopted")
    assert len(events(found.out, "answer-lost")) == 1
    assert len(ec2.launches) == len(ec2.fleets) == len(boxes(ec2, last["job"])) == 1


def test_a_box_that_runs_is_adopted_wherever_it_is(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.capacity = {"us-west-2a"}
    first = had(capsys, *launch(mirror))
    for regions in ("us-west-2", "us-east-1"):  # there, and where the history alone knows of it
        again = had(capsys, *launch(mirror, "--regions", regions))
        assert (again["event"], again["instance"]) == ("adopted", first["instance"])
    assert len(ec2.launches) == 1
    plan = run_main(capsys, *[a for a in launch(mirror) if a != "--apply"])
    assert f"adopts: {first['instance']}" in plan.out


def test_of_two_machines_that_launch_at_once_the_later_gives_its_box_back(
    capsys: Capsys, ec2: Ec2, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec2.capacity = {"us-east-2a"}
    here = ("--regions", "us-east-2")
    first = had(capsys, *launch(mirror, *here))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    ec2.hidden = 3  # the other's box was not listed when this one looked
    time.sleep(
        1.1
    )  # boxes are told apart by whole seconds; of one second, the lower id is kept by both
    found = run_main(capsys, *launch(mirror, *here))
    assert [event["event"] for event in events(found.out)][-2:] == ["given-back", "adopted"]
    assert events(found.out)[-1]["instance"] == first["instance"]
    assert [box["InstanceId"] for box in boxes(ec2, str(first["job"]))] == [first["instance"]]


def test_quota_that_is_known_to_be_too_small_stops_before_anything_is_asked(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.quota = 64
    found = ends(capsys, 10, *launch(mirror))
    assert "quota 64 vCPUs" in found.err and "L-B5D1601B" in found.err
    assert not ec2.fleets


@pytest.mark.fault("spot-06-codes")
def test_quota_on_demand_is_told_from_capacity(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.whole = {"us-east-2": ["VcpuLimitExceeded"]}
    assert "VcpuLimitExceeded" in ends(capsys, 10, *launch(mirror)).err
    assert len(ec2.fleets) == 1


def test_the_price_cap_is_kept_here_and_by_ec2(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.capacity = {"us-east-2b", "us-east-1a", "us-west-2c"}
    ec2.prices |= {f"us-{r}{z}": 9.0 for r in ("east-2", "east-1", "west-2") for z in "acdf"}
    ec2.prices |= {"us-east-1b": 9.0, "us-west-2b": 9.0, "us-west-2c": 9.0, "us-east-1a": 9.0}
    found = run_main(capsys, *launch(mirror, "--max-price", "1.5", "--timeout", "0"))
    assert found.code == 9 and not ec2.fleets
    (nothing,) = events(found.out, "nothing-to-ask")
    assert nothing["obstacles"]["us-east-2b"] == "2.0000 is over the cap of 1.5000"
    assert had(capsys, *launch(mirror, "--max-price", "2.2"))["zone"] == "us-east-2b"
    assert {pool["MaxPrice"] for pool in ec2.fleets[0]["pools"]} == {"2.200000"}


def test_on_demand_is_bought_after_the_time_and_within_the_cap_only(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    ec2.on_demand = {"us-east-2a"}
    late = ("--on-demand-after", "0", "--timeout", "0", "--regions", "us-east-2")
    found = run_main(capsys, *launch(mirror, *late, "--max-price", "6"))
    assert found.code == 9 and all(fleet["spot"] for fleet in ec2.fleets)  # 6.49 on demand
    box = had(capsys, *launch(mirror, *late, "--max-price", "7"))
    assert (box["event"], box["lifecycle"]) == ("launched", "on-demand")
    assert [fleet["spot"] for fleet in ec2.fleets[-2:]] == [True, False]


def test_a_security_group_of_ours_with_an_inbound_rule_is_refused(
    capsys: Capsys, ec2: Ec2, mirror: str
) -> None:
    there = client("ec2", ec2.upstream, "us-west-1")
    (vpc,) = there.describe_vpcs()["Vpcs"]
    group = there.create_security_group(
        GroupName="gemma-neuron", Description="x", VpcId=vpc["VpcId"]
    )["GroupId"]
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    there.authorize_security_group_ingress(
        GroupId=group, IpPermissions=[rule | {"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    )
    ec2.capacity = {"us-west-1a"}
    arguments = launch(mirror, "--regions", "us-west-1", "--types", "t3.micro")
    assert "inbound" in ends(capsys, 8, *arguments).err
    assert not ec2.fleets


def test_no_instance_profile_is_exit_8(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    found = ends(capsys, 8, *launch(mirror, "--instance-profile", "another"))
    assert "examples/iam-policy.json" in found.err
    assert not ec2.fleets
