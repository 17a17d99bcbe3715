"""What a bucket says of this machine's files is not believed: none is sent that is not the bytes a record names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.artifacts import Manifest, digest_bytes
from gemma_neuron.mirror.guarded import Guarded
from gemma_neuron.mirror.layout import SetName, blob_key, read_set
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.owner import acquire
from gemma_neuron.mirror.store import Store
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import keys, variables

BUCKET = "trust"
URI = f"s3://{BUCKET}/gemma"
SECRET = b"aws_secret_access_key = wJalr\n"


@pytest.fixture
def commands(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Against the server, as boto3 in this process."""
    own = variables(server, HOME=str(tmp_path))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return Commands(clean_environment() | own)


@pytest.fixture
def own(port: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(port, tmp_path / "own"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "credentials"
    file.parent.mkdir()
    file.write_bytes(SECRET)
    return file


def naming(secret: Path) -> bytes:
    """A record of a weights file that is none: whoever wrote it knows the place, not the bytes."""
    entry = {
        "name": secret.name,
        "bytes": len(SECRET),
        "seen_at": str(secret.parent),
        "blake3": "0" * 64,
    }
    return json.dumps({"files": [entry]}).encode()


def holds_secret(client: Any) -> list[str]:
    return [
        key
        for key in keys(client, BUCKET)
        if SECRET in client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    ]


def swap_record(client: Any, data: bytes) -> None:
    """Put another `source.json` into the bucket's port, its manifest and marker in order."""
    home = next(key for key in keys(client, BUCKET) if key.endswith("/owner.json"))
    store = Store(S3Location.parse(f"s3://{BUCKET}/{home.removesuffix('/owner.json')}"))
    name = SetName("", "port")
    files = list(read_set(store, name).manifest.files)
    (at,) = [number for number, entry in enumerate(files) if entry.name == "source.json"]
    digest = digest_bytes(data)
    files[at] = files[at].model_copy(update={"bytes": len(data), "blake3": digest})
    store.put(blob_key(digest), data)
    owner = acquire(store, lambda _: None)
    text = Manifest(files=tuple(files)).model_dump_json(indent=1)
    Guarded(store, owner).commit(name, text)
    owner.release()


def test_a_record_from_a_bucket_names_no_file_here(
    own: Path, secret: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    commands.done("mirror", "push", own, URI)
    swap_record(client, naming(secret))
    back = tmp_path / "back"
    commands.done("mirror", "pull", back, URI)
    (entry,) = json.loads((back / "source.json").read_text())["files"]
    assert entry == {"name": secret.name, "bytes": len(SECRET), "blake3": "0" * 64}
    commands.done("mirror", "push", back, URI)
    assert not holds_secret(client)


def test_a_file_of_other_bytes_is_not_sent(
    own: Path, secret: Path, client: Any, commands: Commands
) -> None:
    """Nor under the name of what a checkpoint was when it was cut."""
    (own / "source.json").write_bytes(naming(secret))
    said = commands.done("mirror", "push", own, URI).stderr
    assert "warning: credentials of the checkpoint is not mirrored" in said and "blake3" in said
    assert not holds_secret(client)
    assert not [key for key in keys(client, BUCKET) if "/raw/" in key]


@pytest.mark.parametrize("how", ["not JSON", '{"files": [{"name": "../x", "bytes": 1}]}'])
def test_a_record_that_is_none_is_not_taken(
    how: str, own: Path, client: Any, commands: Commands, tmp_path: Path
) -> None:
    commands.done("mirror", "push", own, URI)
    swap_record(client, how.encode())
    back = tmp_path / "back"
    found = commands.run("mirror", "pull", back, URI)
    assert found.returncode == 5 and "source.json is no record" in found.stderr, found.stderr
    assert not (back / "source.json").exists() and not list(back.glob("*.partial"))


def test_a_file_of_a_set_with_other_bytes_is_not_sent(
    own: Path, client: Any, commands: Commands
) -> None:
    """Of the right size too: the key speaks of its content."""
    graph = next((own / "graphs").glob("*/graph.committed")).parent
    (entry, *_) = json.loads((graph / "graph.manifest.json").read_text())["files"]
    with (graph / entry["name"]).open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    said = commands.refused(75, "mirror", "push", own, URI)
    assert f"graphs/{graph.name}/graph is not mirrored" in said and "blake3" in said
    assert not [key for key in keys(client, BUCKET) if key.endswith(entry["blake3"])]
