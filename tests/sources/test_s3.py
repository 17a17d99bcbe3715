"""An s3:// URI as SOURCE, against moto's server behind a proxy that counts and cuts."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_neuron.errors import (
    AccessError,
    GemmaNeuronError,
    NetworkError,
    SourceNotFoundError,
    UsageError,
)
from gemma_neuron.pipeline.sources import UNWATCHED, open_any
from tests.sources.conftest import OTHERS, files_of
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import KEYS, Proxy, boto, moto, proxied, variables

URI = "s3://gemma-bucket/models/tiny"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def server(tiny: Path, large: Path) -> Iterator[str]:
    """moto with a tiny checkpoint, a large one uploaded in parts, and what lies beside them."""
    with moto() as address:
        client = boto(address)
        client.create_bucket(Bucket="gemma-bucket")
        for name, data in (files_of(tiny) | OTHERS).items():
            client.put_object(Bucket="gemma-bucket", Key=f"models/tiny/{name}", Body=data)
        for path in large.iterdir():
            client.upload_file(str(path), "gemma-bucket", f"models/large/{path.name}")
        yield address


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as passing:
        yield passing


@pytest.fixture
def commands(proxy: Proxy, tmp_path: Path) -> Commands:
    return Commands(
        clean_environment()
        | variables(proxy.address, GEMMA_NEURON_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path))
    )


def cached(commands: Commands) -> Path:
    [folder] = (Path(commands.environment["GEMMA_NEURON_CACHE"]) / "s3" / "gemma-bucket").iterdir()
    return folder


def test_inspect_and_plan_download_no_weights(proxy: Proxy, commands: Commands, tiny: Path) -> None:
    assert commands.document("plan", URI, "--tp", 2) == commands.document("plan", tiny, "--tp", 2)
    objects = {p.path for p in proxy.passed if p.method == "GET" and "list-type" not in p.path}
    assert objects == {"/gemma-bucket/models/tiny/config.json"}
    of_s3, of_folder = commands.document("inspect", URI), commands.document("inspect", tiny)
    of_folder["checkpoint_digest"] = ""
    assert of_s3 == of_folder
    header = struct.unpack("<Q", (tiny / FILE).read_bytes()[:8])[0]
    assert proxy.sent(FILE) == 64 + header + 2 * 6
    assert not any(name in passed.path for passed in proxy.passed for name in OTHERS)


def test_shard_fetches_exactly_a_text_port(
    proxy: Proxy, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    commands.done("shard", URI, "--out", tmp_path / "port", "--tp", 2)
    visible = {path.name for path in cached(commands).iterdir() if path.name[:1] != "."}
    assert visible == set(files_of(tiny))
    record = json.loads((tmp_path / "port" / "port.json").read_text())
    assert record["source"] == {"kind": "s3", "uri": URI, "revision": ""}
    proxy.passed.clear()
    assert commands.document("inspect", URI, "--values") == commands.document("inspect", tiny)
    assert proxy.sent("/models/") == 0  # listed again, nothing fetched


def test_cut_killed_and_started_again(proxy: Proxy, commands: Commands, large: Path) -> None:
    """The upload was in parts, whose MD5s the ETag is made of: the download is checked against it."""
    uri = "s3://gemma-bucket/models/large/"
    commands.done("inspect", uri)
    proxy.seconds_a_piece = 0.005
    process = commands.start("inspect", uri, "--values")
    deadline = time.monotonic() + 60
    while not _finished_parts(commands):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [log] = _finished_parts(commands)
    finished = sum(_part_size(large, int(line.split()[0])) for line in log)
    proxy.passed.clear()
    proxy.seconds_a_piece = 0
    proxy.cuts = [0, 1_000_000, 3_000_000]
    commands.done("inspect", uri, "--values")
    assert proxy.cuts == []
    data = (large / FILE).read_bytes()
    assert (cached(commands) / FILE).read_bytes() == data
    assert not list(cached(commands).glob(".partial/*"))
    assert proxy.sent(FILE) < len(data) - finished + 300_000


def _finished_parts(commands: Commands) -> list[list[str]]:
    root = Path(commands.environment["GEMMA_NEURON_CACHE"])
    logs = [path.read_text().splitlines()[1:] for path in root.glob(f"**/{FILE}*.parts")]
    return [log for log in logs if log]


def _part_size(large: Path, number: int) -> int:
    from gemma_neuron.transfer import PART_BYTES

    return min(PART_BYTES, (large / FILE).stat().st_size - number * PART_BYTES)


def test_an_object_that_was_replaced_is_fetched_again(
    server: str, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    client = boto(server)
    for name, data in files_of(tiny).items():
        client.put_object(Bucket="gemma-bucket", Key=f"models/changing/{name}", Body=data)
    uri = "s3://gemma-bucket/models/changing"
    before = commands.document("inspect", uri, "--values")
    template = (tiny / "chat_template.jinja").read_bytes() + b"{# changed #}"
    client.put_object(
        Bucket="gemma-bucket", Key="models/changing/chat_template.jinja", Body=template
    )
    after = commands.document("inspect", uri)
    assert after["chat_template"]["sha256"] != before["chat_template"]["sha256"]


def test_keys_that_are_no_plain_names(server: str, commands: Commands, tiny: Path) -> None:
    client = boto(server)
    for name, data in files_of(tiny).items():
        client.put_object(Bucket="gemma-bucket", Key=f"odd/{name}", Body=data)
    client.put_object(Bucket="gemma-bucket", Key="odd/LICENSE\\x", Body=b"x")
    assert "plain names" in commands.refused(3, "inspect", "s3://gemma-bucket/odd")


@pytest.fixture
def here(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process with the commands' environment: a refusal needs no process of its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def refused(uri: str, kind: type[GemmaNeuronError]) -> str:
    with pytest.raises(GemmaNeuronError) as caught:
        open_any(uri, UNWATCHED)
    assert type(caught.value) is kind and caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


def test_refusals(proxy: Proxy, here: pytest.MonkeyPatch) -> None:
    message = refused("s3://no-such-bucket/x", AccessError)
    assert "no bucket no-such-bucket" in message and "AWS_ENDPOINT_URL_S3" in message
    assert "no object" in refused("s3://gemma-bucket/models", SourceNotFoundError)
    for uri in ("s3://", "s3://B/x", "s3://gemma-bucket/a/../b"):
        assert "no S3 location" in refused(uri, UsageError)
    proxy.statuses = [403]
    message = refused(URI, AccessError)
    assert "may not read" in message and "s3:ListBucket" in message
    here.setenv("AWS_PROFILE", "absent")
    message = refused(URI, AccessError)
    assert "absent" in message and "AWS_PROFILE" in message
    here.delenv("AWS_PROFILE")
    for name in KEYS:
        here.delenv(name)
    message = refused(URI, AccessError)
    assert "credentials" in message and "AWS_PROFILE" in message


def test_a_store_that_is_away_ends_in_bounded_time(here: pytest.MonkeyPatch) -> None:
    here.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    here.setenv("AWS_MAX_ATTEMPTS", "2")
    started = time.monotonic()
    assert "EndpointConnectionError" in refused(URI, NetworkError)
    assert time.monotonic() - started < 60


def test_no_credentials_by_version_1_of_the_metadata_service(
    proxy: Proxy, commands: Commands
) -> None:
    """A metadata service that refuses tokens is not asked without one."""
    with proxied("http://127.0.0.1:9") as metadata:
        metadata.statuses = [403] * 100
        anonymous = {k: v for k, v in commands.environment.items() if k not in KEYS}
        anonymous["AWS_EC2_METADATA_DISABLED"] = "false"
        anonymous["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = metadata.address
        message = Commands(anonymous).refused(8, "inspect", URI)
        assert "credentials" in message
        assert metadata.asked and {method for method, _ in metadata.asked} == {"PUT"}
