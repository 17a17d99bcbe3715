"""A port in a bucket and back: against moto's server, by the commands people type."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.mirror.layout import MirroredManifest, MirroredMarker, SetName
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.parts import FROM_BYTES, part_bytes, upload
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import Port
from gemma_neuron.source_entries import shared
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import Proxy, keys, proxied, variables

BUCKET = "ports"
URI = f"s3://{BUCKET}/gemma"


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as passing:
        yield passing


def environment(address: str, home: Path) -> dict[str, str]:
    return clean_environment() | variables(address, HOME=str(home))


@pytest.fixture
def commands(server: str, tmp_path: Path) -> Commands:
    return Commands(environment(server, tmp_path))


@pytest.fixture
def in_process(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 in this process asks moto too."""
    for name, value in environment(server, tmp_path).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)


@pytest.fixture
def own(port: Path, tmp_path: Path) -> Path:
    """A port of the test's own; its checkpoint is at hand."""
    return Path(shutil.copytree(port, tmp_path / "own"))


def files_of(port: Path) -> dict[str, bytes]:
    """Everything of a port but its lock."""
    return {
        str(path.relative_to(port)): path.read_bytes()
        for path in sorted(port.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_pushed_port_comes_back_byte_for_byte(
    own: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    first = commands.document("mirror", "push", own, URI)
    assert first["objects"]["uploaded"] > 10 and first["objects"]["bad"] == 0
    again = commands.document("mirror", "push", own, URI)
    assert again["objects"]["uploaded"] <= 3  # port.json's set, with the events of the first push

    before = files_of(own)
    pulled = commands.document("mirror", "pull", tmp_path / "back", URI)
    assert pulled["objects"]["bad"] == 0
    assert pulled["objects"]["verified"] == pulled["objects"]["total"]
    back = files_of(tmp_path / "back")
    # the event of a push is written when all is uploaded
    assert before.pop("events.jsonl").startswith(back.pop("events.jsonl"))
    # where the checkpoint lies is this machine's own business
    assert str(own.parent) not in back["source.json"].decode()
    assert back.pop("source.json") == shared(before.pop("source.json"))
    assert back == before
    assert commands.document("mirror", "pull", tmp_path / "back", URI)["objects"]["downloaded"] <= 1

    status = commands.document("mirror", "status", own, URI)
    assert {"port", "source/source", "weights/rank-00", "weights/rank-01"} <= status["sets"].keys()
    verified = commands.document("mirror", "verify", own, URI)
    assert verified["objects"]["verified"] == verified["objects"]["total"] > 10
    assert "generation 2" in verified["owner"]


def test_only_the_port_that_was_named_will_do(
    own: Path, source: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    """A graph is native code: the digest that compile and pull print covers its bytes."""
    asked = (
        "compile", source, "--out", own, "--backend", "cpu", "--tp", 2, "--dtype", "float32",
        "--max-context", 48, "--slots", 3, "--buckets", "24",
    )  # fmt: skip
    digest = commands.document(*asked)["digest"]
    assert commands.document(*asked, "--expect-digest", digest)["digest"] == digest
    commands.done("mirror", "push", own, URI)
    pull = ("mirror", "pull", tmp_path / "back", URI, "--expect-digest")
    assert commands.document(*pull, digest)["digest"] == digest
    assert "no digest" in commands.refused(2, *pull, "abc")

    other = Port(Path(shutil.copytree(own, tmp_path / "other")))
    unit_set = other.unit_set(other.spec.units()[0])
    manifest = unit_set.manifest()
    assert manifest is not None
    (unit_set.folder / manifest.files[0].name).write_bytes(b"another's code")
    unit_set.commit([entry.name for entry in manifest.files], manifest.facts)
    commands.done("mirror", "push", other.path, f"{URI}-other")
    swapped = ("mirror", "pull", tmp_path / "swapped", f"{URI}-other", "--expect-digest", digest)
    said = commands.refused(5, *swapped)
    assert digest in said and other.contents_digest() in said
    there = [*asked[:3], other.path, *asked[4:]]
    assert "not the port that was asked for" in commands.refused(
        5, *there, "--expect-digest", digest
    )


def test_the_checkpoint_lies_once_by_content(own: Path, client: Any, commands: Commands) -> None:
    commands.done("mirror", "push", own, URI)
    (entry,) = json.loads((own / "source.json").read_text())["files"]
    found = client.get_object(Bucket=BUCKET, Key=f"gemma/raw/{entry['blake3']}")
    assert digest_bytes(found["Body"].read()) == entry["blake3"]


def test_a_wrong_object_is_named_and_never_committed(
    own: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    commands.done("mirror", "push", own, URI)
    manifest = Port(own).rank_set(1).manifest()
    assert manifest is not None
    key = next(k for k in keys(client, BUCKET) if k.endswith(manifest.files[0].blake3))
    whole = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    for damaged in (whole[:-1], b"\x01" + whole[1:]):
        client.put_object(Bucket=BUCKET, Key=key, Body=damaged)
        found = commands.run("mirror", "verify", own, URI)
        assert found.returncode == 5 and "BAD weights/rank-01" in found.stdout
        back = tmp_path / f"back-{len(damaged)}"
        found = commands.run("mirror", "pull", back, URI)
        assert found.returncode == 5 and "weights/rank-01" in found.stderr
        assert (back / "weights/rank-00.committed").is_file()
        assert not (back / "weights/rank-01.committed").exists()
    # what is whole on this machine mends the bucket
    mended = commands.document("mirror", "push", own, URI, "--verify")
    assert (
        1 <= mended["objects"]["uploaded"] <= 4
    )  # the object, and port.json's set with its events
    assert mended["objects"]["verified"] > 10
    assert commands.run("mirror", "verify", own, URI).returncode == 0


def test_names_from_a_bucket_stay_inside_the_port(
    own: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    commands.done("mirror", "push", own, URI)
    home = next(k for k in keys(client, BUCKET) if k.endswith("/owner.json")).removesuffix(
        "owner.json"
    )
    text = json.dumps({"files": [{"name": "../../x", "bytes": 1, "blake3": "0" * 64}]})
    for folder in ("weights", "weights/..", "../weights", "graphs/../..", "graphs/.hidden"):
        manifest = MirroredManifest(generation=9, local=text).data()
        marker = MirroredMarker(generation=9, manifest=digest_bytes(manifest)).data()
        client.put_object(Bucket=BUCKET, Key=f"{home}{folder}/evil.manifest.json", Body=manifest)
        client.put_object(Bucket=BUCKET, Key=f"{home}{folder}/evil.committed", Body=marker)
    found = commands.run("mirror", "pull", tmp_path / "deep" / "back", URI)
    assert found.returncode == 5
    assert found.stderr.count("warning: ") == 1 and "weights/evil" in found.stderr
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"back"}
    assert not list(tmp_path.rglob("x")) and not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "key", ["x.committed", "../port.committed", "weights/a/b.committed", "graphs/.committed", "port.manifest.json"]
)  # fmt: skip
def test_what_is_no_marker_of_a_port_is_passed_over(key: str) -> None:
    assert SetName.of_marker(key) is None


@pytest.mark.usefixtures("in_process", "client")
@pytest.mark.fault("spot-01-multipart-left")
@pytest.mark.fault("spot-02-resume")
def test_a_large_file_goes_on_with_the_parts_it_has(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.address)
    size = FROM_BYTES + 5_000_001
    file = tmp_path / "large"
    file.write_bytes(os.urandom(1_000_000) * (size // 1_000_000 + 1))
    os.truncate(file, size)
    store = Store(S3Location.parse(URI))
    parts = -(-size // part_bytes(size))

    class DiedError(Exception):
        pass

    def die_after(count: int) -> None:
        if sent() >= count:
            raise DiedError

    def sent() -> int:
        return sum(method == "PUT" and "partNumber" in path for method, path in proxy.asked)

    with pytest.raises(DiedError):
        upload(store, "raw/large", file, lambda _: None, lambda: die_after(2))
    first = sent()
    assert 2 <= first < parts
    proxy.statuses += [503, 500]
    upload(store, "raw/large", file, lambda _: None, lambda: None)
    # a part of a request that was refused is asked for again
    assert parts <= sent() <= parts + 2
    body = store.client.get_object(**store.at("raw/large"))["Body"].read()
    assert body == file.read_bytes()
    assert not store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_what_cannot_be_mirrored_to_is_refused_before_the_work(
    source: Path, client: Any, commands: Commands, own: Path, tmp_path: Path
) -> None:
    arguments = ("compile", source, "--out", tmp_path / "new", "--tp", "2", "--backend", "cpu")
    said = commands.refused(2, *arguments, "--mirror", "http://x/y")
    assert "s3://bucket/prefix" in said
    assert "there is no bucket nobodys" in commands.refused(
        8, "mirror", "push", own, "s3://nobodys/x"
    )
    assert "holds 0 ports" in commands.refused(2, "mirror", "pull", tmp_path / "none", URI)
    assert "is no port" in commands.refused(5, "mirror", "push", tmp_path / "none", URI)
