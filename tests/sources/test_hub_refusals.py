"""What the hub refuses, and what a user is told to do about it."""

from __future__ import annotations

import json
import subprocess

import pytest

from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.errors import SourceNotFoundError
from tests.sources.hub_stand_in import HubStandIn, commit_of
from tests.sources.processes import Commands, refusal

REPO = "google/gemma-tiny"


def test_gated_without_a_token(hub: HubStandIn, commands: Commands) -> None:
    hub.gate = "gated"
    message = commands.refused(8, "plan", REPO)
    assert "gated" in message and "401" in message
    assert f"{hub.endpoint}/{REPO}" in message and "HF_TOKEN" in message and "Accept" in message


def test_gated_to_this_account(hub: HubStandIn, commands: Commands) -> None:
    hub.gate = "gated"
    message = commands.having(HF_TOKEN="hf_other").refused(8, "inspect", REPO)
    assert "403" in message and "is restricted" in message
    assert f"{hub.endpoint}/{REPO}" in message and "HF_TOKEN" in message and "Accept" in message
    assert "hf_other" not in message


def test_private_or_absent(hub: HubStandIn, commands: Commands) -> None:
    hub.gate = "private"
    message = commands.refused(8, "inspect", REPO)
    assert "401" in message and "HF_TOKEN" in message and f"{hub.endpoint}/{REPO}" in message
    message = commands.having(HF_TOKEN="hf_old").refused(8, "inspect", REPO)
    assert "does not accept the token" in message


def test_unknown_repository_and_revision(hub: HubStandIn, commands: Commands) -> None:
    message = commands.refused(3, "inspect", "google/gemma-4-99B")
    assert "neither a folder" in message and "google/gemma-4-99B" in message
    message = commands.refused(3, "inspect", f"{REPO}@v9")
    assert "no revision v9" in message and f"{hub.endpoint}/{REPO}" in message


@pytest.mark.parametrize("revision", ["../../etc", "a//b", "..", "-x", "a/../b"])
def test_revisions_that_are_paths(revision: str) -> None:
    """Before anything is asked of a hub."""
    with pytest.raises(SourceNotFoundError):
        open_source(f"{REPO}@{revision}")


def test_file_names_that_are_not_plain(hub: HubStandIn, commands: Commands) -> None:
    files = hub.commits[commit_of(1)]
    hub.add(commit_of(2), files | {"LICENSE\x1b[2J": b"x"})
    message = commands.refused(3, "inspect", REPO)
    assert "plain names" in message and "\x1b" not in message


def test_too_little_disk(hub: HubStandIn, commands: Commands) -> None:
    """Refused with both numbers, before a byte of the weights is asked for."""
    data = hub.commits[commit_of(1)]["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    end = len(body) + 4 * 10**14
    header["model.vision_tower.huge"] = {
        "dtype": "F32",
        "shape": [10**14],
        "data_offsets": [len(body), end],
    }
    text = json.dumps(header).encode()
    files = hub.commits[commit_of(1)] | {
        "model.safetensors": len(text).to_bytes(8, "little") + text + body
    }
    hub.add(commit_of(2), files)
    hub.sizes["model.safetensors"] = 8 + len(text) + end
    assert commands.document("inspect", REPO)["verdict"] == "ok"
    message = commands.refused(8, "inspect", REPO, "--values")
    assert f"{8 + len(text) + end:,} more bytes" in message and "are free" in message
    assert hub.sent("/storage/") < 3 * len(text)


def test_a_small_file_that_is_not_small(hub: HubStandIn, commands: Commands) -> None:
    hub.sizes["README.md"] = 10**15
    assert "at most" in commands.refused(3, "inspect", REPO)


def test_a_server_that_drops_ranges(hub: HubStandIn, commands: Commands) -> None:
    hub.ignore_ranges = True
    message = commands.refused(8, "inspect", REPO)
    assert "bytes 0 to 63 were asked for" in message and "answered 200" in message


def test_a_hub_that_fails_or_is_away(hub: HubStandIn, commands: Commands) -> None:
    """Retries end. Both at once: each waits some ten seconds."""
    hub.statuses = [503] * 1000
    failing = commands.start("plan", REPO)
    away = commands.having(HF_ENDPOINT="http://127.0.0.1:9").start("plan", REPO)
    for process, said in ((failing, "answered 503"), (away, "ConnectError")):
        out, err = process.communicate(timeout=60)
        message = refusal(8, subprocess.CompletedProcess("", process.returncode, out, err))
        assert said in message and "6 " in message
    assert len(hub.asked("/api/models/")) == 6
    message = commands.having(HF_HUB_OFFLINE="1").refused(8, "plan", REPO)
    assert "HF_HUB_OFFLINE" in message


def test_trouble_that_passes(hub: HubStandIn, commands: Commands) -> None:
    hub.statuses = [503, 429, 500]
    hub.stale_after = 3
    hub.cuts = [0, 10]
    assert commands.document("inspect", REPO)["verdict"] == "ok"
    assert len(hub.links) > 1  # signed links ran out and were asked for again
