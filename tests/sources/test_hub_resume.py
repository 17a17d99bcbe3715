"""Large files: cut, killed, altered; what arrived is not fetched again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_neuron.transfer import PART_BYTES
from tests.sources.conftest import files_of
from tests.sources.hub_stand_in import HubStandIn, commit_of, serving, sha256
from tests.sources.processes import Commands

REPO = "google/gemma-tiny"
FILE = "model.safetensors"


@pytest.fixture
def hub(large: Path) -> Iterator[HubStandIn]:
    stand_in = HubStandIn()
    stand_in.add(commit_of(1), files_of(large))
    with serving(stand_in):
        yield stand_in


def repository(commands: Commands) -> Path:
    return Path(commands.environment["HF_HOME"]) / "hub" / "models--google--gemma-tiny"


def whole(commands: Commands, large: Path) -> bool:
    fetched = repository(commands) / "snapshots" / commit_of(1) / FILE
    data = (large / FILE).read_bytes()
    assert fetched.is_symlink() and fetched.resolve().name == sha256(data)
    assert not (repository(commands) / ".gemma-neuron").exists()
    return fetched.read_bytes() == data


def test_cut_connections_go_on_where_they_were(
    hub: HubStandIn, commands: Commands, large: Path
) -> None:
    hub.cuts = [10_000_000_000] * 8 + [1_000_000, 3_000_000, 5_000_000, 0, 2_000_000]
    found = commands.done("inspect", REPO, "--values")
    assert hub.cuts == []
    assert whole(commands, large)
    assert hub.sent(f"/storage/{FILE}") < (large / FILE).stat().st_size + 200_000
    assert "fetching" in found.stderr and commit_of(1) in found.stderr


def test_killed_and_started_again(hub: HubStandIn, commands: Commands, large: Path) -> None:
    hub.seconds_a_piece = 0.005
    process = commands.start("inspect", REPO, "--values")
    log = repository(commands) / ".gemma-neuron" / commit_of(1) / f"{FILE}.partial.parts"
    deadline = time.monotonic() + 60
    while not (log.is_file() and len(log.read_text().splitlines()) >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = len(log.read_text().splitlines()) - 1
    hub.seconds_a_piece = 0.0
    hub.requests.clear()
    commands.done("inspect", REPO, "--values")
    assert whole(commands, large)
    size = (large / FILE).stat().st_size
    assert finished >= 1
    assert hub.sent(f"/storage/{FILE}") < size - finished * min(PART_BYTES, 6_000_000) + 200_000


def test_interrupted_says_so(hub: HubStandIn, commands: Commands) -> None:
    hub.seconds_a_piece = 0.05
    process = commands.start("inspect", REPO, "--values")
    while not hub.sent(f"/storage/{FILE}") > 1_000_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75 and "Run the same command" in err


def test_altered_bytes_are_refused_and_forgotten(
    hub: HubStandIn, commands: Commands, large: Path
) -> None:
    """Another proxy's idea of the file, and a part that changed on the disk between two runs."""
    hub.flip = 30_000_000
    message = commands.refused(5, "inspect", REPO, "--values")
    assert "digest" in message and sha256((large / FILE).read_bytes()) in message
    hub.flip = None
    commands.done("inspect", REPO, "--values")
    assert whole(commands, large)
    blob = (repository(commands) / "snapshots" / commit_of(1) / FILE).resolve()
    blob.write_bytes(blob.read_bytes()[:-1000])  # a cache whose disk was full once
    commands.done("inspect", REPO, "--values")
    assert whole(commands, large)
