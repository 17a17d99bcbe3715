"""examples/: policies that IAM's grammar takes and that name every right the code asks for; tasks that use exit 75.

scripts/check-examples runs the formats' own validators over the task and the Job.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemma_neuron.mirror.client import READ_RIGHTS, WRITE_RIGHTS
from tests.cli_process import run_main
from tests.spot.conftest import client

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SPOT = ROOT / "gemma_neuron" / "spot"
RIGHT = re.compile(r"\b(?:ec2|iam|pricing|servicequotas|ssm|sts|s3):[A-Z]\w+")


def rights(name: str) -> set[str]:
    policy = json.loads((EXAMPLES / name).read_text())
    found: set[str] = set()
    for statement in policy["Statement"]:
        actions = statement["Action"]
        found |= {actions} if isinstance(actions, str) else set(actions)
    return found


@pytest.mark.parametrize("name", ["iam-policy.json", "iam-policy-launch.json"])
def test_a_policy_is_one_that_iam_takes(address: str, name: str) -> None:
    iam = client("iam", address, "us-east-1")
    text = (EXAMPLES / name).read_text()
    made = iam.create_policy(PolicyName=name.removesuffix(".json"), PolicyDocument=text)
    assert made["Policy"]["Arn"]


def test_policies_name_every_right_that_is_asked_for() -> None:
    asked = {
        right for path in SPOT.glob("*.py") for right in RIGHT.findall(path.read_text("utf-8"))
    }
    assert "ec2:CreateFleet" in asked and "ec2:DescribeInstances" in asked
    assert asked <= rights("iam-policy-launch.json")
    assert set(RIGHT.findall(READ_RIGHTS + WRITE_RIGHTS)) <= rights("iam-policy.json")


def _arguments(name: str) -> list[str]:
    """The command of an example, its variables filled in."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    if name == "kubernetes-job.yaml":
        (container,) = found["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["gemma-neuron"]
        return list(container["args"])
    (line,) = [line for line in found["run"].splitlines() if line.startswith("exec ")]
    for variable, value in found["envs"].items():
        line = line.replace(f"${variable}", value)
    return shlex.split(line)[2:]


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "skypilot.yaml"])
def test_a_command_of_an_example_is_one_of_ours(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_main(capsys, *_arguments(name))
    assert found.code == 8, found.err  # understood, and this machine has no Neuron SDK


def test_75_goes_on_and_what_would_fail_again_does_not() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    job = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_action = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
    }
    assert by_action == {"Ignore": [75], "FailJob": [2, 3, 4, 5, 6, 8]}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
