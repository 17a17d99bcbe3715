"""moto's server with a bucket and an instance profile, once for this folder; and the scripted EC2 before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.real_configs import FOLDER
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import KEYS, boto, moto, variables
from tests.spot.ec2 import Ec2, scripted

BUCKET, SOURCE = "models", "s3://models/gemma-4-31B"


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with moto() as found:
        store = boto(found)
        store.create_bucket(Bucket=BUCKET)
        config = (FOLDER / "gemma-4-31B.json").read_bytes()
        store.put_object(Bucket=BUCKET, Key="gemma-4-31B/config.json", Body=config)
        iam = client("iam", found, "us-east-1")
        iam.create_role(RoleName="gemma-neuron", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="gemma-neuron")
        iam.add_role_to_instance_profile(
            InstanceProfileName="gemma-neuron", RoleName="gemma-neuron"
        )
        yield found


def client(service: str, address: str, region: str) -> Any:
    """A client of the test's own, past the proxy."""
    return boto3.client(
        service,
        endpoint_url=address,
        region_name=region,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )


@pytest.fixture
def ec2(address: str) -> Iterator[Ec2]:
    """us-east-2 is cheapest, then us-east-1; us-west-2 comes third."""
    with scripted(address) as found:
        found.prices = {"us-east-2b": 2.0, "us-east-1a": 2.4, "us-west-2c": 3.1}
        yield found


@pytest.fixture
def environment(ec2: Ec2, address: str, tmp_path: Path) -> dict[str, str]:
    own = {
        "AWS_ENDPOINT_URL": ec2.address,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GEMMA_NEURON_CACHE": str(tmp_path / "cache"),
    }
    return clean_environment() | variables(address, **own)


@pytest.fixture
def commands(environment: dict[str, str]) -> Commands:
    return Commands(environment)


@pytest.fixture
def here(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the environment of a command."""
    for name, value in environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """A prefix, and so a job, of the test's own."""
    return f"s3://{BUCKET}/{tmp_path.name}"
