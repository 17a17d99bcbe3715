"""A compile that is asked to end while it fetches, pulls, cuts or uploads: by EC2, by signals, beside a store that does
not answer. The command itself, a real metadata server, moto behind a proxy."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import DISABLED, ENDPOINT
from gemma_neuron.elastic.notice import ENDING_SECONDS, POLL_SECONDS, UPLOAD_SECONDS
from gemma_neuron.mirror.owner import OWNER_KEY
from gemma_neuron.pipeline import CompileRequest, compile_port
from gemma_neuron.port import Port
from tests.elastic.imds_stand_in import Metadata
from tests.pipeline.conftest import FLAGS, REQUEST
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import Proxy, keys, proxied, variables

BUCKET = "ending"
URI = f"s3://{BUCKET}/gemma"
SOON_SECONDS = 15.0
"""From a signal to the end of a process on a busy machine, nothing being waited for."""


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as passing:
        yield passing
        passing.held = ""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


@pytest.fixture
def commands(proxy: Proxy, metadata: Metadata, tmp_path: Path) -> Commands:
    own = variables(proxy.address, HOME=str(tmp_path), AWS_MAX_ATTEMPTS="1")
    return Commands(clean_environment() | own | {ENDPOINT: metadata.url, DISABLED: "false"})


@pytest.fixture
def mirrored(port: Path, client: Any, commands: Commands, tmp_path: Path) -> str:
    """A bucket that has the whole port."""
    own = tmp_path / "pushed"
    shutil.copytree(port, own)
    commands.done("mirror", "push", own, URI)
    return URI


class Run:
    """A command that is asked to end."""

    def __init__(self, commands: Commands, *arguments: object) -> None:
        self.process = commands.start(*arguments)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not holds():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        self.asked = time.monotonic()

    def ended(self, within: float) -> tuple[int, dict[str, Any]]:
        """Its exit code and document."""
        try:
            out, said = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        assert "Traceback" not in said, said
        return self.process.returncode, json.loads(out)


def ask(how: str, run: Run, metadata: Metadata) -> tuple[int, float]:
    """Have it end; the exit code that is due, and within how many seconds."""
    if how == "notice":
        metadata.take_away(120)
        return 75, POLL_SECONDS + SOON_SECONDS
    number = signal.Signals[how]
    run.process.send_signal(number)
    return (130 if number == signal.SIGINT else 75), SOON_SECONDS


@pytest.mark.parametrize("how", ["notice", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_pull_from_a_store_that_does_not_answer(
    how: str, mirrored: str, proxy: Proxy, commands: Commands, metadata: Metadata, source: Path, tmp_path: Path
) -> None:  # fmt: skip
    """Its threads wait for the store, nobody for them; the lease is given back."""
    proxy.held = "GET .*blobs/"
    run = Run(commands, "compile", source, "--out", tmp_path / "new", *FLAGS, "--mirror", mirrored)
    run.until(lambda: any(method == "GET" and "blobs/" in path for method, path in proxy.asked))
    code, within = ask(how, run, metadata)
    found, document = run.ended(within)
    assert found == code, document
    assert document["error"]["type"] in ("Interrupted", "Cancelled", "PreemptionNotice")
    assert owner(proxy, mirrored)["released"]


def owner(proxy: Proxy, uri: str) -> dict[str, Any]:
    from tests.sources.s3_servers import boto

    client = boto(proxy.upstream)
    (key,) = [key for key in keys(client, BUCKET) if key.endswith(OWNER_KEY)]
    found: dict[str, Any] = json.loads(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    return found


@pytest.mark.parametrize("how", ["notice", "SIGTERM"])
def test_a_single_request_that_is_not_answered(
    how: str, client: Any, proxy: Proxy, commands: Commands, metadata: Metadata, source: Path, tmp_path: Path
) -> None:  # fmt: skip
    """botocore makes a connection's trouble of any Exception, and tries that again."""
    proxy.held = OWNER_KEY
    run = Run(commands, "compile", source, "--out", tmp_path / "new", *FLAGS, "--mirror", URI)
    run.until(lambda: any(OWNER_KEY in path for _, path in proxy.asked))
    code, within = ask(how, run, metadata)
    assert run.ended(within)[0] == code


def test_a_notice_during_a_download(
    client: Any, server: str, metadata: Metadata, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for path in source.iterdir():
        client.upload_file(str(path), BUCKET, f"model/{path.name}")
    own = variables(server, HOME=str(tmp_path), GEMMA_NEURON_CACHE=str(tmp_path / "cache"))
    for name, value in {**own, ENDPOINT: metadata.url, DISABLED: "false"}.items():
        monkeypatch.setenv(name, value)
    posted: list[float] = []

    class Slow:
        def tell(self, line: str) -> None: ...

        def progress(self, count: int) -> None:
            if not posted:
                metadata.take_away(120)
                posted.append(time.monotonic())
            time.sleep(60)

    request = CompileRequest(out=tmp_path / "new", **REQUEST)
    with pytest.raises(PreemptionNotice):
        compile_port(f"s3://{BUCKET}/model", request, None, lambda _: None, Slow())
    assert len(posted) == 1 and time.monotonic() - posted[0] < 2 * POLL_SECONDS + SOON_SECONDS


def test_a_notice_while_ranks_are_cut(
    metadata: Metadata, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, metadata.url)
    monkeypatch.delenv(DISABLED, raising=False)
    posted: list[float] = []

    class Slow:
        def begin(self, label: str, total: int) -> None:
            metadata.take_away(120)
            posted.append(time.monotonic())

        def __call__(self, count: int, of: int | str) -> None:
            time.sleep(0.5)

    request = CompileRequest(out=tmp_path / "new", **REQUEST)
    with pytest.raises(PreemptionNotice):
        compile_port(str(source), request, Slow(), lambda _: None)
    assert len(posted) == 1 and time.monotonic() - posted[0] < 2 * POLL_SECONDS
    (event,) = [e for e in Port(tmp_path / "new").events() if e["event"] == "notice"]
    assert event["outlook"] == "notice"


@pytest.mark.parametrize("how", ["notice", "SIGTERM"])
def test_the_wait_for_the_last_uploads(
    how: str, port: Path, client: Any, proxy: Proxy, commands: Commands, metadata: Metadata,
    source: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """All is built; a store that takes nothing keeps the process a bounded time, and the lease is given back."""
    own = tmp_path / "own"
    shutil.copytree(port, own)
    proxy.held = "blobs/"
    run = Run(commands, "compile", source, "--out", own, *FLAGS, "--mirror", URI)
    run.until(lambda: any(e["event"] == "done" and e["life"] == 2 for e in Port(own).events()))
    time.sleep(1.0)
    left = 75.0
    if how == "notice":
        metadata.take_away(left)
        within = left
    else:
        run.process.send_signal(signal.SIGTERM)
        within = UPLOAD_SECONDS + ENDING_SECONDS
    assert run.ended(within)[0] == 75
    assert owner(proxy, URI)["released"]


def test_a_notice_beside_a_store_that_stops_answering(
    client: Any, proxy: Proxy, commands: Commands, metadata: Metadata, source: Path, tmp_path: Path
) -> None:
    """The process has ended before the machine does, whatever the store does."""
    left = 60.0
    run = Run(commands, "compile", source, "--out", tmp_path / "new", *FLAGS, "--mirror", URI)
    events = Port(tmp_path / "new").events
    run.until(lambda: any(e["event"] == "worker_started" for e in events()))
    proxy.held = BUCKET
    metadata.take_away(left)
    code, document = run.ended(left)
    assert code == 75 and document["error"]["type"] == "PreemptionNotice"


def test_a_second_ctrl_c_waits_for_no_upload(
    client: Any, proxy: Proxy, commands: Commands, source: Path, tmp_path: Path
) -> None:
    run = Run(commands, "compile", source, "--out", tmp_path / "new", *FLAGS, "--mirror", URI)
    events = Port(tmp_path / "new").events
    run.until(lambda: any(e["event"] == "worker_started" for e in events()))
    proxy.held = BUCKET
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
    assert run.ended(SOON_SECONDS)[0] == 130
