"""`spot launch --apply` as a user runs it, against moto's EC2 behind a proxy that has EC2's capacity and refusals."""

from __future__ import annotations

import base64
import signal
import subprocess
import time

import pytest

from tests.sources.processes import Commands, refusal
from tests.spot.conftest import client
from tests.spot.ec2 import IMAGE, Ec2
from tests.spot.launching import boxes, events, launch


@pytest.mark.fault("spot-04-fallback")
@pytest.mark.fault("spot-05-dstack")
def test_capacity_that_appears_in_the_third_region_is_taken_within_one_poll(
    commands: Commands, ec2: Ec2, mirror: str
) -> None:
    ec2.appears = (5, "us-west-2c")
    found = commands.done(*launch(mirror))
    launched = events(found.stdout)[-1]
    assert (launched["event"], launched["zone"]) == ("launched", "us-west-2c")
    # five rounds without, and the first that finds it there takes it
    assert [ec2.times_asked(r) for r in ("us-east-2", "us-east-1", "us-west-2")] == [6, 6, 6]
    assert len(events(found.stdout, "waiting")) == 5
    assert len(ec2.launches) == 1
    (box,) = boxes(ec2, launched["job"])
    assert (box["InstanceId"], box["InstanceLifecycle"]) == (launched["instance"], "spot")
    assert box["InstanceType"] == "inf2.24xlarge"


def test_what_a_box_is(commands: Commands, ec2: Ec2, mirror: str) -> None:
    ec2.capacity = {"us-east-2b"}
    found = commands.done(*launch(mirror, "--max-price", "2.5"))
    (launched,) = events(found.stdout, "launched")
    for said in ("2.0000 USD an hour", "1.1 h", "us-east-2: about 123.03 GB would cross"):
        assert said in found.stderr  # before it was bought
    there = client("ec2", ec2.upstream, "us-east-2")
    name = f"gemma-neuron-{launched['job']}"
    (version,) = there.describe_launch_template_versions(LaunchTemplateName=name)[
        "LaunchTemplateVersions"
    ]
    data = version["LaunchTemplateData"]
    assert data["ImageId"] == IMAGE
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["IamInstanceProfile"]["Arn"].endswith(":instance-profile/gemma-neuron")
    (root,) = data["BlockDeviceMappings"]
    assert root["DeviceName"] == "/dev/sda1"
    assert (root["Ebs"]["VolumeType"], root["Ebs"]["Encrypted"]) == ("gp3", True)
    # the image's 100 GiB, twice the 61.4 GB of weights and some, SDK and scratch
    assert 260 <= root["Ebs"]["VolumeSize"] <= 300
    tagged = {tags["ResourceType"] for tags in data["TagSpecifications"]}
    assert tagged >= {"instance", "volume"}
    (group,) = there.describe_security_groups(GroupIds=data["SecurityGroupIds"])["SecurityGroups"]
    assert group["IpPermissions"] == []
    text = base64.b64decode(data["UserData"]).decode()
    assert f"--backend neuron --tp 8 --max-context 32k --mirror {mirror}" in text
    assert commands.environment["AWS_SECRET_ACCESS_KEY"] not in text
    (fleet,) = ec2.fleets
    assert {pool["MaxPrice"] for pool in fleet["pools"]} == {"2.500000"}
    assert fleet["fields"]["Type"] == "instant"


@pytest.mark.fault("spot-06-codes")
def test_quota_stops_at_once(commands: Commands, ec2: Ec2, mirror: str) -> None:
    code = "MaxSpotInstanceCountExceeded"
    ec2.refusal = dict.fromkeys(("us-east-2a", "us-east-2b", "us-east-2c"), code)
    said = commands.refused(10, *launch(mirror))
    assert code in said and "us-east-2" in said and "--regions" in said
    assert len(ec2.fleets) == 1 and not ec2.launches


@pytest.mark.fault("spot-06-codes")
def test_authorisation_stops_at_once(commands: Commands, ec2: Ec2, mirror: str) -> None:
    ec2.whole = {"us-east-2": ["UnauthorizedOperation"]}
    said = commands.refused(8, *launch(mirror))
    assert "UnauthorizedOperation" in said and "iam-policy-launch.json" in said
    assert "xxxx" not in said  # the encoded message
    assert len(ec2.fleets) == 1 and not ec2.launches


@pytest.mark.fault("spot-08-double-launch")
def test_a_call_that_launches_and_times_out_is_adopted(
    commands: Commands, ec2: Ec2, mirror: str
) -> None:
    ec2.capacity, ec2.lose, ec2.hang = {"us-east-2a", "us-west-2c"}, 1, 3.0
    found = events(commands.done(*launch(mirror, "--call-timeout", "1")).stdout)
    assert [event["event"] for event in found] == ["answer-lost", "tried", "adopted"]
    assert len(ec2.launches) == 1
    (box,) = boxes(ec2, found[-1]["job"])
    assert box["InstanceId"] == found[-1]["instance"]


@pytest.mark.fault("spot-08-double-launch")
def test_killed_while_its_answer_is_lost_the_next_run_finds_the_box(
    commands: Commands, ec2: Ec2, mirror: str
) -> None:
    ec2.capacity, ec2.lose, ec2.hang = {"us-east-2a"}, 1, 1.0
    first = commands.start(*launch(mirror))
    until = time.monotonic() + 60
    while not ec2.launches and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    ec2.hidden = 8  # EC2 does not list it yet: three looks at quota, three at boxes, and two more
    found = events(commands.done(*launch(mirror)).stdout)
    assert found[-1]["event"] == "adopted"
    assert {event["event"] for event in found[:-1]} == {"looking"}
    assert len(ec2.launches) == len(ec2.fleets) == len(boxes(ec2, found[-1]["job"])) == 1


def test_sigterm_while_waiting_is_75_and_buys_nothing(
    commands: Commands, ec2: Ec2, mirror: str
) -> None:
    process = commands.start(*launch(mirror, "--poll", "30"))
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    found = refusal(75, subprocess.CompletedProcess(process.args, process.returncode, out, err))
    assert "same command" in found
    assert not ec2.launches
