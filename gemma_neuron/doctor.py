"""What of this machine a port needs: Python, back ends, C++ compiler, memory, disk; and of an account, a spot box."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gemma_neuron.backends.base import Check
from gemma_neuron.backends.registry import MODULES, backend
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.machine import memory_limit
from gemma_neuron.settings import KEY_VARIABLE

DISK_WANTED = 10 * 10**9
MEMORY_WANTED = 4 * 2**30
TORCH_RANGE = ("2.9", "2.13")


def examine() -> list[dict[str, str]]:
    """All checks, in the order a user would fix them."""
    checks = [
        _python(),
        _torch(),
        *_backends(),
        _memory(),
        _disk(Path.cwd()),
        _credentials(),
        _key(),
    ]
    return [asdict(check) for check in checks]


def examine_aws(
    regions: Sequence[str], types: Sequence[str], profile: str, mirror: str, bucket_owner: str
) -> list[dict[str, str]]:
    """What an AWS account lacks for `spot launch`: rights by dry runs, quota, image, profile, bucket. Buys nothing."""
    from gemma_neuron.spot.account import Account
    from gemma_neuron.spot.checks import examine_account

    checks = examine_account(Account(), regions, types, profile)
    return [asdict(check) for check in (*checks, _bucket(mirror, bucket_owner))]


def _bucket(uri: str, bucket_owner: str) -> Check:
    """Whether the mirror can be written and heeds conditions; writes an object of no meaning and deletes it."""
    needed = "a bucket that may be read and written, and heeds conditions on writes"
    if not uri:
        remedy = "Name it: --mirror s3://bucket/prefix."
        return Check(name="bucket", status="warn", found="not named", needed=needed, remedy=remedy)
    from gemma_neuron.mirror.location import S3Location
    from gemma_neuron.mirror.store import Store

    try:
        store = Store(S3Location.parse(uri), bucket_owner)
        region, heeds = store.bucket_region(), store.honours_conditions()
    except GemmaNeuronError as error:
        return Check(
            name="bucket", status="fail", found=error.message, needed=needed, remedy=error.hint
        )
    found = f"{uri} in {region}, written and deleted" + ("" if heeds else "; ignores conditions")
    remedy = "" if heeds else "One machine only may mirror there (--mirror-only-writer)."
    return Check(
        name="bucket", status="ok" if heeds else "warn", found=found, needed=needed, remedy=remedy
    )


def default_backend() -> str:
    """The back end `--backend` defaults to: neuron where NeuronCores are, else cpu."""
    return "neuron" if Path("/dev/neuron0").exists() else "cpu"


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    right = sys.version_info >= (3, 11)
    return Check(
        name="python",
        status="ok" if right else "fail",
        found=found,
        needed="3.11 or newer",
        remedy="Install Python 3.11.",
    )


def _torch() -> Check:
    needed = f"{TORCH_RANGE[0]} to {TORCH_RANGE[1]}"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name="torch",
            status="fail",
            found="none",
            needed=needed,
            remedy="pip install torch==2.13.0",
        )
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    right = (2, 9) <= numbers <= (2, 13)
    return Check(
        name="torch",
        status="ok" if right else "fail",
        found=found,
        needed=needed,
        remedy="pip install torch==2.13.0",
    )


def _backends() -> list[Check]:
    checks = [check for name in MODULES for check in backend(name).checks()]
    if backend("neuron").probe().usable:  # which needs no C++ compiler
        checks = [
            replace(c, status="warn") if c.name == "back end cpu" and c.status == "fail" else c
            for c in checks
        ]
    return checks


def _memory() -> Check:
    found = memory_limit()
    return Check(
        name="memory",
        status="ok" if found.total >= MEMORY_WANTED else "warn",
        found=f"{found.total / 2**30:.1f} GiB ({found.origin})",
        needed=f"{MEMORY_WANTED / 2**30:.0f} GiB to compile two small graphs at once",
        remedy="Compile on a machine with more memory.",
    )


def _disk(folder: Path) -> Check:
    found = shutil.disk_usage(folder).free
    return Check(
        name="disk",
        status="ok" if found >= DISK_WANTED else "warn",
        found=f"{found / 1e9:.1f} GB free in the current folder",
        needed="the checkpoint's size and some more",
        remedy="Free some room, or give --out a folder on a larger disk.",
    )


def _credentials() -> Check:
    """What there is, not whether it is accepted: that needs the network (`--aws`)."""
    from gemma_neuron.aws import credentials_kind
    from gemma_neuron.checkpoint.hub.problems import has_token

    token = "set" if has_token() else "not set"
    return Check(
        name="credentials",
        status="ok",
        found=f"hub token {token}, AWS {credentials_kind() or 'none'}",
        needed="a hub token for gated models (HF_TOKEN), AWS's for s3:// and --mirror; --aws tries those",
    )


def _key() -> Check:
    there = bool(os.environ.get(KEY_VARIABLE))
    return Check(
        name="api key",
        status="ok",
        found="set" if there else "not set",
        needed=f"only to serve beyond loopback ({KEY_VARIABLE})",
    )
