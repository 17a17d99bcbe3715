"""A store that is away, comes back, or stops answering while a port is mirrored: against moto's server and a proxy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.artifacts import CommittedSet, digest_bytes, digest_file
from gemma_neuron.errors import CompileError, Interrupted, NotMirroredError
from gemma_neuron.mirror import abandoned
from gemma_neuron.mirror.abandoned import ABANDONED_SECONDS
from gemma_neuron.mirror.background import LOOK_SECONDS, MirrorOptions
from gemma_neuron.mirror.layout import SetName, blob_key, port_id, read_set
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.owner import RELEASE_SECONDS
from gemma_neuron.mirror.parts import FROM_BYTES, WORKERS, upload
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.uploads import RELEASE_SECONDS as THREAD_SECONDS
from gemma_neuron.pipeline.mirroring import mirrored
from gemma_neuron.port import UNIT_STEM, Port
from tests.sharding.shards import cut
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import Proxy, keys, proxied, variables

BUCKET = "trouble"
URI = f"s3://{BUCKET}/gemma"
GRACE = 2.0


@pytest.fixture
def proxy(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the server, for this process and those it starts; boto3 asks each thing once, and nobody waits at the
    start."""
    monkeypatch.setattr("gemma_neuron.pipeline.mirroring.START_SECONDS", 0.0)
    with proxied(server) as passing:
        own = variables(passing.address, AWS_MAX_ATTEMPTS="1", HOME=str(tmp_path))
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        yield passing
        passing.held = ""


@pytest.fixture
def ranks(source: Path, tmp_path: Path) -> Path:
    """A port's folder with rank files and no graphs: what is mirrored is files either way."""
    out = tmp_path / "ranks"
    cut(source, out, 2)
    return out


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_store_that_comes_back_during_the_work_is_mirrored_to_at_once(
    ranks: Path, client: Any, proxy: Proxy
) -> None:
    """Not only at the end: a machine that is taken away before that would lose all of it."""
    told: list[str] = []
    proxy.statuses += [503] * 1000
    with mirrored(Port(ranks), MirrorOptions(uri=URI), told.append):
        assert any("working without the mirror" in line for line in told)
        assert not keys(client, BUCKET)
        proxy.statuses.clear()
        wait_for(lambda: any(key.endswith("rank-01.committed") for key in keys(client, BUCKET)))
    assert [line["event"] for line in Port(ranks).events()][-1] == "mirrored"


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_what_a_store_has_that_was_away_at_the_start_is_not_made_anew(
    ranks: Path, client: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:  # fmt: skip
    """It is waited for, a while; one that comes later is asked between two stages."""
    with mirrored(Port(ranks), MirrorOptions(uri=URI), lambda _: None):
        pass
    fresh = tmp_path / "fresh"
    shutil.copytree(ranks, fresh, ignore=shutil.ignore_patterns("weights"))
    monkeypatch.setattr("gemma_neuron.pipeline.mirroring.START_SECONDS", patience)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "waiting up to" in line:
            proxy.statuses.clear()

    proxy.statuses += [503] * 1000
    with mirrored(Port(fresh), MirrorOptions(uri=URI), tell) as take_more:
        assert Port(fresh).rank_file(1).is_file() == bool(patience)
        proxy.statuses.clear()
        if not patience:
            wait_for(lambda: any("is reached now" in line for line in told))
            take_more()
            take_more()
    assert Port(fresh).rank_file(1).read_bytes() == Port(ranks).rank_file(1).read_bytes()
    assert any("waiting up to 60 s" in line for line in told) == bool(patience)
    assert sum("mirror: took" in line for line in told) == 1


def test_a_store_that_never_comes_back_is_no_reason_to_hide_what_the_work_died_of(
    ranks: Path, client: Any, proxy: Proxy
) -> None:
    proxy.statuses += [503] * 1000
    started = time.monotonic()
    with (
        pytest.raises(CompileError, match="of its own"),
        mirrored(Port(ranks), MirrorOptions(uri=URI, grace=GRACE), lambda _: None),
    ):
        raise CompileError("of its own", "")
    assert time.monotonic() - started < 60


def test_a_store_that_stops_answering_keeps_nobody_past_the_grace(
    ranks: Path, client: Any, proxy: Proxy
) -> None:
    with (
        pytest.raises(NotMirroredError, match="rank-01"),
        mirrored(Port(ranks), MirrorOptions(uri=URI, grace=GRACE), lambda _: None),
    ):
        proxy.held = BUCKET
        started = time.monotonic()
    bound = GRACE + 2 * THREAD_SECONDS + RELEASE_SECONDS
    assert time.monotonic() - started < bound + 5


def test_ctrl_c_ends_a_push_to_a_store_that_stopped_answering(
    ranks: Path, client: Any, proxy: Proxy, tmp_path: Path
) -> None:
    """In the middle of a large file's parts, whose threads Python would wait for at its end."""
    large = tmp_path / "model.safetensors"
    with large.open("wb") as file:
        file.truncate(FROM_BYTES + 1)
    entry = {
        "name": large.name,
        "bytes": FROM_BYTES + 1,
        "seen_at": str(tmp_path),
        "blake3": digest_file(large),
    }
    record = json.loads((ranks / "source.json").read_text())
    (ranks / "source.json").write_text(json.dumps(record | {"files": [entry]}))
    proxy.held = "partNumber"
    commands = Commands(clean_environment() | {k: v for k, v in os.environ.items() if "AWS" in k})
    process = commands.start("mirror", "push", ranks, URI)
    try:
        # the checkpoint comes after the port's own files
        wait_for(lambda: any("partNumber" in path for _, path in proxy.asked), 240)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130 and "Traceback" not in said, said
    assert time.monotonic() - started < 2 * THREAD_SECONDS + RELEASE_SECONDS


def commit_graph(port: Port, name: str, data: bytes = b"a graph") -> Path:
    """What a worker leaves, and the ledger's line of it."""
    unit = port.path / "graphs" / name
    unit.mkdir(parents=True, exist_ok=True)
    (unit / "package.pt2").write_bytes(data)
    CommittedSet(unit, UNIT_STEM).commit(["package.pt2"])
    port.append("ledger.jsonl", {"unit": name, "outcome": "built"})
    return unit


def ledger_in(client: Any) -> str:
    """The ledger that the bucket's port names."""
    home = next(key for key in keys(client, BUCKET) if key.endswith("/owner.json"))
    store = Store(S3Location.parse(f"s3://{BUCKET}/{home.removesuffix('/owner.json')}"))
    if store.size("port.committed") is None:
        return ""
    files = read_set(store, SetName("", "port")).manifest.files
    digest = next((entry.blake3 for entry in files if entry.name == "ledger.jsonl"), "")
    found = store.read(blob_key(digest)) if digest else None
    return "" if found is None else found.data.decode()


def test_a_graph_and_the_ledger_wait_for_no_rank_file(
    ranks: Path, client: Any, proxy: Proxy
) -> None:
    """A rank file is cut again in minutes, a graph takes an hour: not even one that came first holds it up."""
    port = Port(ranks)
    rank = blob_key(digest_file(port.rank_file(0)))
    with (
        pytest.raises(Interrupted),
        mirrored(port, MirrorOptions(uri=URI, grace=10 * GRACE), lambda _: None),
    ):
        proxy.held = rank
        wait_for(lambda: any(rank in path for _, path in proxy.asked))
        commit_graph(port, "decode-b3-l1")
        wait_for(lambda: any(key.endswith("l1/graph.committed") for key in keys(client, BUCKET)))
        wait_for(lambda: "decode-b3-l1" in ledger_in(client))
        commit_graph(port, "decode-b3-l2")
        raise Interrupted("a notice", "")
    sent = keys(client, BUCKET)
    assert any(key.endswith("l2/graph.committed") for key in sent)
    assert "decode-b3-l2" in ledger_in(client)
    assert not any(key.endswith("rank-00.committed") for key in sent)


def test_rank_files_give_way_while_a_graph_is_sent(ranks: Path, client: Any, proxy: Proxy) -> None:
    port = Port(ranks)
    data = b"a graph that takes long to send"
    with mirrored(port, MirrorOptions(uri=URI), lambda _: None):
        wait_for(lambda: any(key.endswith("rank-01.committed") for key in keys(client, BUCKET)))
        proxy.held = blob_key(digest_bytes(data))
        commit_graph(port, "decode-b3-l1", data)
        wait_for(lambda: any(proxy.held in path for _, path in proxy.asked))
        again = port.rank_set(0)
        manifest = again.manifest()
        assert manifest is not None
        again.commit_entries(manifest.files, manifest.facts | {"made": "again"})
        before = len(proxy.asked)
        time.sleep(4 * LOOK_SECONDS)
        puts = [path for method, path in proxy.asked[before:] if method == "PUT"]
        proxy.held = ""  # before what may fail: the end would wait for the graph
        assert not [path for path in puts if "weights" in path]


def test_a_set_that_was_refused_is_sent_once_it_is_made_again(
    ranks: Path, client: Any, proxy: Proxy
) -> None:
    """Of the very same bytes too, as rank files are."""
    port = Port(ranks)
    whole = port.rank_file(1).read_bytes()
    os.truncate(port.rank_file(1), len(whole) // 2)
    told: list[str] = []
    with mirrored(port, MirrorOptions(uri=URI), told.append):
        wait_for(lambda: any("rank-01 is not mirrored" in line for line in told))
        port.rank_set(1).withdraw()
        port.rank_file(1).write_bytes(whole)
        port.rank_set(1).commit([port.rank_file(1).name])
    assert any(key.endswith("rank-01.committed") for key in keys(client, BUCKET))
    assert sum("rank-01 is not mirrored" in line for line in told) == 1


def test_all_uploads_together_have_few_parts_in_memory(
    tmp_path: Path, client: Any, proxy: Proxy
) -> None:
    file = tmp_path / "large"
    with file.open("wb") as made:
        made.truncate(2 * FROM_BYTES)
    store = Store(S3Location.parse(URI))
    proxy.held = "partNumber"
    names = "one", "other"
    threads = [
        threading.Thread(target=upload, args=(store, name, file, lambda _: None, lambda: None))
        for name in names
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum("partNumber" in path for _, path in proxy.asked) >= WORKERS)
    time.sleep(2)
    assert sum("partNumber" in path for _, path in proxy.asked) == WORKERS
    proxy.held = ""
    for thread in threads:
        thread.join()
    assert [store.size(name) for name in names] == [2 * FROM_BYTES] * 2


def test_uploads_that_nobody_goes_on_with_are_aborted(
    ranks: Path, client: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this port and of the checkpoints; not another's, nor young ones. moto gives all of them one old date."""
    identity = port_id(Port(ranks).record.digest)
    ours = f"gemma/{identity}/blobs/x", "gemma/raw/y"
    for key in (*ours, "gemma/another/blobs/z"):
        client.create_multipart_upload(Bucket=BUCKET, Key=key)
    for seconds, left in ((1e12, 3), (ABANDONED_SECONDS, 1)):
        monkeypatch.setattr(abandoned, "ABANDONED_SECONDS", seconds)
        with mirrored(Port(ranks), MirrorOptions(uri=URI), lambda _: None):
            pass
        assert len(client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]) == left


@pytest.mark.fault("orig-10-truncated-neff-upload")
def test_what_is_still_being_written_is_not_sent(ranks: Path, client: Any, proxy: Proxy) -> None:
    """Neither a file without a marker, nor one whose marker speaks of more bytes than there are."""
    port = Port(ranks)
    growing = ranks / "graphs" / "decode-b3-l1.partial"
    growing.mkdir(parents=True)
    (growing / "package.pt2").write_bytes(b"PK\x03\x04 the first half")
    (ranks / "weights" / "rank-02.safetensors").write_bytes(b"half")
    os.truncate(port.rank_file(1), port.rank_file(1).stat().st_size // 2)
    told: list[str] = []
    with (
        pytest.raises(NotMirroredError, match="weights/rank-01"),
        mirrored(port, MirrorOptions(uri=URI, grace=30.0), told.append),
    ):
        wait_for(lambda: any(key.endswith("rank-00.committed") for key in keys(client, BUCKET)))
    assert any("rank-01 is not mirrored" in line and "manifest says" in line for line in told)
    sent = keys(client, BUCKET)
    assert not [key for key in sent if "rank-01." in key or "rank-02" in key or "decode" in key]
    halves = {digest_file(path) for path in (port.rank_file(1), growing / "package.pt2")}
    assert not [key for key in sent if key.rsplit("/", 1)[-1] in halves]
