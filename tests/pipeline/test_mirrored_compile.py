"""`compile --mirror` on machines that go away: real processes, real signals, moto's server."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from gemma_neuron.port import Port
from gemma_neuron.transfer import Transfer
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import boto, keys, moto, proxied, variables

URI = "s3://spot/gemma"
UNITS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as address:
        boto(address).create_bucket(Bucket="spot")
        yield address


@pytest.fixture
def commands(server: str, tmp_path: Path) -> Commands:
    return Commands(clean_environment() | variables(server, HOME=str(tmp_path)))


def arguments(source: Path, out: Path) -> tuple[object, ...]:
    """The port of conftest's REQUEST, as people type it."""
    return (
        "compile", source, "--out", out, "--backend", "cpu", "--tp", 2, "--dtype", "float32",
        "--max-context", 48, "--slots", 3, "--buckets", "24",
    )  # fmt: skip


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ended whatever happens: a compile that a failed test left would work on beside the next."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def built(port: Path) -> list[str]:
    return [line["unit"] for line in Port(port).ledger() if line["outcome"] == "built"]


@pytest.mark.fault("cc-04-remote-cache")
@pytest.mark.fault("cc-07-cache-tmpdir")
def test_a_machine_that_vanishes_loses_only_units_in_flight(
    source: Path, commands: Commands, tmp_path: Path
) -> None:
    """SIGTERM after the first unit; the folder is gone; the same command in an empty one goes on from S3."""
    with running(commands.start(*arguments(source, tmp_path / "first"), "--mirror", URI)) as first:
        graphs = tmp_path / "first" / "graphs"
        wait_until(lambda: bool(list(graphs.glob("*/graph.committed"))), first)
        first.send_signal(signal.SIGTERM)
        _, said = first.communicate(timeout=120)
    assert first.returncode == 75, said
    before = built(tmp_path / "first")
    assert before
    ranks = [Port(tmp_path / "first").rank_file(rank).read_bytes() for rank in (0, 1)]
    shutil.rmtree(tmp_path / "first")

    result = commands.document(*arguments(source, tmp_path / "second"), "--mirror", URI)
    assert result["units"] == {"total": UNITS, "built": UNITS - len(before), "reused": len(before)}
    lines = built(tmp_path / "second")
    assert sorted(lines) == sorted(set(lines)) and len(lines) == UNITS
    assert ranks == [Port(tmp_path / "second").rank_file(rank).read_bytes() for rank in (0, 1)]
    events = [line["event"] for line in Port(tmp_path / "second").events()]
    assert events[-1] == "mirrored"

    third = commands.document(*arguments(source, tmp_path / "third"), "--mirror", URI)
    assert third["units"] == {"total": UNITS, "built": 0, "reused": UNITS}
    assert commands.document("mirror", "verify", tmp_path / "third", URI)["objects"]["bad"] == 0


def test_a_store_that_is_away_never_stops_the_work(
    source: Path, port: Path, commands: Commands, tmp_path: Path
) -> None:
    """Exit 75 at the end, with all that was made; the same command mirrors it when the store is back."""
    own = tmp_path / "own"
    shutil.copytree(port, own)
    away = commands.having(AWS_ENDPOINT_URL_S3="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1")
    found = away.run(*arguments(source, own), "--mirror", "s3://spot/other", "--json")
    assert found.returncode == 75, found.stderr
    assert "working without the mirror" in found.stderr
    error = json.loads(found.stdout)["error"]
    assert error["type"] == "NotMirroredError"
    again = commands.document(*arguments(source, own), "--mirror", "s3://spot/other")
    assert again["units"] == {"total": UNITS, "built": 0, "reused": UNITS}
    checked = commands.document("mirror", "verify", own, "s3://spot/other")
    assert checked["objects"]["verified"] == checked["objects"]["total"] > 10


def test_a_wrong_object_in_the_bucket_is_made_again_and_written_over(
    source: Path, port: Path, server: str, commands: Commands, tmp_path: Path
) -> None:
    """Rank files are the same bytes each time, so the new one goes under the name of the wrong one."""
    uri = "s3://spot/mended"
    commands.done("mirror", "push", shutil.copytree(port, tmp_path / "own"), uri)
    manifest = Port(port).rank_set(1).manifest()
    assert manifest is not None
    client = boto(server)
    own = [key for key in keys(client, "spot") if key.startswith("mended/")]
    (key,) = [key for key in own if key.endswith(manifest.files[0].blake3)]
    whole = client.get_object(Bucket="spot", Key=key)["Body"].read()
    client.put_object(Bucket="spot", Key=key, Body=whole[:-1] + bytes([whole[-1] ^ 1]))
    assert commands.run("mirror", "verify", port, uri).returncode == 5

    found = commands.done(*arguments(source, tmp_path / "new"), "--mirror", uri)
    assert "weights/rank-01 is not taken from the mirror" in found.stderr
    assert built(tmp_path / "new") == built(port)
    assert client.get_object(Bucket="spot", Key=key)["Body"].read() == whole
    assert commands.document("mirror", "verify", port, uri)["objects"]["bad"] == 0


def test_a_part_that_was_begun_is_gone_on_with(
    source: Path, port: Path, server: str, commands: Commands, tmp_path: Path
) -> None:
    """A compile was killed while it took a rank file from the mirror, all of whose parts had come."""
    uri, new = "s3://spot/begun", tmp_path / "new"
    commands.done("mirror", "push", shutil.copytree(port, tmp_path / "own"), uri)
    shutil.copytree(port, new)
    rank = Port(new).rank_set(0)
    manifest = rank.manifest()
    assert manifest is not None
    (entry,) = manifest.files
    rank.withdraw()
    whole = (rank.folder / entry.name).read_bytes()
    (rank.folder / entry.name).unlink()
    growing = rank.folder / f"{entry.name}.{entry.blake3[:16]}.partial"
    transfer = Transfer(size=entry.bytes, partial=growing, new_hash=blake3)
    transfer.run(lambda at, count: iter([whole[at : at + count]]), lambda _: False, lambda _: None)
    litter = rank.folder / f"{entry.name}.0123456789abcdef.partial.parts"
    litter.write_text("parts of another")

    with proxied(server) as proxy:
        there = commands.having(AWS_ENDPOINT_URL_S3=proxy.address)
        there.done(*arguments(source, new), "--mirror", uri)
        assert not proxy.sent(entry.blake3)
    assert (rank.folder / entry.name).read_bytes() == whole
    assert not list(rank.folder.glob("*.partial*"))


def test_a_checkpoint_that_is_gone_with_its_machine_is_put_back(
    source: Path, port: Path, server: str, commands: Commands, tmp_path: Path
) -> None:
    """The same command in an empty folder, on a machine that never had SOURCE."""
    uri, lost = "s3://spot/gone", tmp_path / "a checkpoint"
    shutil.copytree(source, lost)
    own = Path(shutil.copytree(port, tmp_path / "own"))
    record = Port(own).record
    moved = record.source.model_copy(update={"uri": str(lost.resolve())})
    Port(own).write_record(record.model_copy(update={"source": moved}))
    files = json.loads((own / "source.json").read_text())
    files["files"][0]["seen_at"] = str(lost)
    (own / "source.json").write_text(json.dumps(files))
    commands.done("mirror", "push", own, uri)
    before = {path.name: path.read_bytes() for path in lost.iterdir()}
    shutil.rmtree(lost)
    shutil.rmtree(own)
    assert "There is no folder" in commands.refused(
        3, *arguments(lost, tmp_path / "none"), "--mirror", "s3://spot/empty"
    )

    lost.mkdir()
    (lost / "notes.txt").write_text("of somebody else")
    commands.refused(3, *arguments(lost, own), "--mirror", uri)
    (lost / "notes.txt").unlink()
    found = commands.done(*arguments(lost, own), "--mirror", uri)
    assert "is gone; putting it back" in found.stderr
    assert {path.name: path.read_bytes() for path in lost.iterdir()} == before
    assert built(own) == built(port) and Port(own).record.source == moved


def test_the_checkpoint_is_left_out_where_it_is_not_wanted(
    port: Path, server: str, commands: Commands, tmp_path: Path
) -> None:
    own = shutil.copytree(port, tmp_path / "own")
    commands.done("mirror", "push", own, "s3://spot/small", "--no-mirror-raw")
    names = keys(boto(server), "spot")
    assert any(name.startswith("small/") for name in names)
    assert not any(name.startswith("small/raw/") for name in names)
