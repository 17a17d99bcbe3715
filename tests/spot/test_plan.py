"""What `spot` says without buying: offers, a launch's plan, the start script, and what is refused as typed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gemma_neuron import __version__
from gemma_neuron.spot.user_data import Job, script
from tests.cli_process import run_main
from tests.sources.processes import Commands
from tests.spot.conftest import SOURCE
from tests.spot.ec2 import Ec2
from tests.spot.launching import events, launch

Capsys = pytest.CaptureFixture[str]
READS = ("Describe", "Get", "List", "Head")


def test_without_apply_nothing_is_made_and_all_of_it_is_said(
    commands: Commands, ec2: Ec2, mirror: str
) -> None:
    arguments = [
        a for a in launch(mirror, "--max-price", "3", "--max-hours", "4") if a != "--apply"
    ]
    plan = commands.document(*arguments)
    assert all(action.startswith(READS) for _, action in ec2.asked if action)
    assert (plan["applied"], plan["boxes"], plan["max_hours"]) == (False, [], 4.0)
    assert plan["candidates"][:2] == ["us-east-2b", "us-east-1a"]
    assert "us-west-2c" not in plan["candidates"]  # 3.10, over the cap
    # 39 published minutes, and more
    assert 0.65 < plan["expected_hours"] < 2
    # the mirror lies in us-east-1; elsewhere 61.4 GB of checkpoint and 61.6 of rank files cross a border
    crossing = plan["cross_region_bytes"]
    assert crossing["us-east-1"] == 0
    assert crossing["us-east-2"] == pytest.approx(123e9, rel=0.01)
    assert plan["command"][:3] == ["gemma-neuron", "compile", SOURCE]
    shown = commands.done(*arguments).stdout
    for said in ("3.0000 USD an hour", "2.0000 USD an hour", "123.03 GB", "ends itself after 4 h"):
        assert said in shown
    assert "nothing was bought or made" in shown


@pytest.mark.usefixtures("here")
def test_scan(capsys: Capsys, ec2: Ec2) -> None:
    found = run_main(capsys, "spot", "scan", "--regions", "us-east-1,us-west-1", "--json")
    assert found.code == 0
    offers = json.loads(found.out)["offers"]
    best = offers[0]
    assert (best["region"], best["zone"], best["price"]) == ("us-east-1", "us-east-1a", 2.4)
    assert (best["quota_vcpus"], best["score"], best["offered"]) == (9600, 3, True)
    assert not any(row["offered"] for row in offers if row["region"] == "us-west-1")


@pytest.mark.usefixtures("here")
def test_what_informs_may_be_missing_and_what_decides_may_not(capsys: Capsys, ec2: Ec2) -> None:
    for action in ("GetServiceQuota", "GetSpotPlacementScores", "DescribeSpotPriceHistory"):
        ec2.refused[action] = "AccessDeniedException"
    arguments = ("spot", "scan", "--regions", "us-east-1", "--json")
    found = json.loads(run_main(capsys, *arguments).out)
    assert any(row["offered"] for row in found["offers"])
    assert {problem["kind"] for problem in found["problems"]} == {"authorisation"}
    ec2.refused = {"DescribeInstanceTypeOfferings": "UnauthorizedOperation"}
    refused = run_main(capsys, *arguments)
    assert refused.code == 8 and "DescribeInstanceTypeOfferings" in refused.err


@pytest.mark.usefixtures("here")
def test_watch_ends_with_an_offer_within_the_price(capsys: Capsys, ec2: Ec2) -> None:
    arguments = ("spot", "watch", "--regions", "us-east-2", "--poll", "0.05")
    found = run_main(capsys, *arguments, "--max-price", "1", "--timeout", "0.005")
    assert found.code == 9
    assert len([e for e in events(found.out, "offer") if e["zone"] == "us-east-2b"]) == 1
    found = run_main(capsys, *arguments, "--max-price", "2.5")
    assert (found.code, events(found.out)[-1]["zone"]) == (0, "us-east-2b")
    assert ec2.count("CreateFleet") == 0


@pytest.mark.usefixtures("here")
def test_doctor_says_which_right_is_missing(capsys: Capsys, ec2: Ec2, mirror: str) -> None:
    ec2.refused, ec2.refused_regions = {"CreateFleet": "UnauthorizedOperation"}, {"us-east-1"}
    ec2.quota = 64
    arguments = ("doctor", "--aws", "--regions", "us-east-1,us-east-2", "--json", "--mirror")
    found = run_main(capsys, *arguments, mirror)
    assert found.code == 8
    checks = {check["name"]: check for check in json.loads(found.out)["checks"]}
    assert checks["rights us-east-1"]["found"] == "missing: ec2:CreateFleet"
    assert checks["rights us-east-2"]["status"] == "ok"
    assert checks["quota us-east-2 inf2.24xlarge"]["status"] == "warn"
    assert checks["bucket"]["status"] == checks["instance profile"]["status"] == "ok"
    assert not ec2.fleets
    missing = run_main(capsys, *arguments, "s3://no-such-bucket/x")
    assert "no-such-bucket" in json.loads(missing.out)["checks"][-1]["found"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--toolkit", "gemma-neuron"), "not pinned"),
        (("--toolkit", "git+https://example.org/g@main"), "not pinned"),
        (("--regions", "narnia"), "no AWS region"),
        (("--types", "big"), "no instance type"),
        (("--hf-token-parameter", "hf_abcdefgh"), "not a token"),
        (("--mirror", "models"), "no S3 location"),
        (("--tp", "12"), "tp 12 cannot be"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: Capsys, ec2: Ec2, mirror: str, typed: tuple[str, ...], said: str
) -> None:
    found = run_main(capsys, *launch(mirror, *typed))
    assert found.code == (4 if "--tp" in typed else 2)
    assert said in found.err.replace("\n", " ")
    assert not ec2.fleets


@pytest.mark.usefixtures("here")
def test_a_mirror_without_its_bucket_is_named(capsys: Capsys, ec2: Ec2) -> None:
    found = run_main(capsys, *[a for a in launch("s3://not-there/port") if a != "--apply"])
    assert found.code == 8 and "there is no bucket not-there" in found.err


@pytest.mark.usefixtures("here")
def test_a_folder_of_this_machine_is_no_source(capsys: Capsys, tmp_path: Path, ec2: Ec2) -> None:
    arguments = list(launch("s3://models/m"))
    arguments[2] = tmp_path
    assert "cannot read" in run_main(capsys, *arguments).err.replace("\n", " ")


STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $1" in
  "python3 -m") mkdir -p "$3/bin"; cp "$STUBS/pip" "$STUBS/gemma-neuron" "$3/bin/" ;;
  "gemma-neuron compile") n=$(grep -c ^gemma-neuron "$CALLS"); exit $(echo "$EXITS" | cut -d, -f"$n") ;;
  "curl -sf") echo i-0123 ;;
  "aws ssm") echo hub-secret ;;
esac
"""


def boot(tmp_path: Path, exits: str, **more: str) -> list[str]:
    """The start script, run by bash on a machine whose programs only write down how they were called."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("shutdown", "python3", "pip", "gemma-neuron", "aws", "curl", "sleep"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    command = ("compile", "org/model@main", "--out", "/opt/port", "--tp", "8")
    job = Job(id="j", command=command, report="s3://b/m/boxes/j", max_hours=2.5, **more)
    text = script(job, "us-east-2").replace("/opt/", f"{tmp_path}/opt/")
    text = text.replace("/var/log", str(tmp_path))
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "STUBS": str(stubs),
        "EXITS": exits,
    }
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=60)
    return calls.read_text().splitlines()


def test_a_box_installs_compiles_again_on_75_reports_and_ends_itself(tmp_path: Path) -> None:
    calls = boot(tmp_path, "75,0")
    assert calls[0].startswith("shutdown -h +150 ")  # first of all: whatever follows, it ends
    assert calls[-1] == "shutdown -h now"
    (install,) = [call for call in calls if call.startswith("pip install")]
    assert install.endswith(f"gemma-neuron[neuron]=={__version__}")
    compiles = [call for call in calls if call.startswith("gemma-neuron compile")]
    assert len(compiles) == 2 and compiles[0] == compiles[1]
    reports = [call for call in calls if call.startswith("aws s3 cp") and "i-0123.json" in call]
    assert len(reports) == 2


def test_a_gated_models_token_is_read_by_the_box(tmp_path: Path) -> None:
    calls = boot(tmp_path, "0", token_parameter="/gemma-neuron/hf-token")
    (read,) = [call for call in calls if call.startswith("aws ssm")]
    assert "--name /gemma-neuron/hf-token --with-decryption" in read
    assert not any("hub-secret" in call for call in calls)


def test_a_compile_that_fails_is_reported_and_not_repeated(tmp_path: Path) -> None:
    calls = boot(tmp_path, "6")
    assert sum(call.startswith("gemma-neuron compile") for call in calls) == 1
    assert any("i-0123.log" in call for call in calls)
    assert calls[-1] == "shutdown -h now"


def test_a_wheel_with_another_digest_is_not_installed(tmp_path: Path) -> None:
    wheel = f"s3://b/gemma_neuron-1-py3-none-any.whl#sha256={'0' * 64}"
    calls = boot(tmp_path, "0", toolkit=wheel)
    assert not any(call.startswith(("pip", "gemma-neuron")) for call in calls)
    assert calls[-1] == "shutdown -h now"
