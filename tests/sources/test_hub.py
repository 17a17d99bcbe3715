"""A hub id as SOURCE: what is read, what is fetched, what is recorded, and that it works again without the network."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from tests.sources.conftest import OTHERS, PAPERS, files_of
from tests.sources.hub_stand_in import TOKEN, HubStandIn, commit_of
from tests.sources.processes import Commands
from tests.tiny import read_safetensors, write_sharded

REPO = "google/gemma-tiny"


def snapshot(commands: Commands, number: int = 1) -> Path:
    cache = Path(commands.environment["HF_HOME"]) / "hub"
    return cache / "models--google--gemma-tiny" / "snapshots" / commit_of(number)


def resolved(hub: HubStandIn) -> set[str]:
    """Names that were asked for, by any method."""
    return {
        r.path.rpartition("/")[2].partition("?")[0] for r in hub.requests if "/resolve/" in r.path
    }


def without_digest(document: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in document.items() if key != "checkpoint_digest"}


def test_inspect_reads_headers_and_buffers_and_no_weights(
    hub: HubStandIn, commands: Commands, tiny: Path
) -> None:
    of_folder = commands.document("inspect", tiny)
    hub.gate = "gated"
    of_hub = commands.having(HF_TOKEN=TOKEN).document("inspect", REPO)
    assert without_digest(of_hub) == without_digest(of_folder)
    assert of_hub["checkpoint_digest"] == "" != of_folder["checkpoint_digest"]
    data = (tiny / "model.safetensors").read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    assert hub.sent("/storage/") == 64 + header + 2 * 6  # six bfloat16 layer_scalars
    assert not resolved(hub) & {name.rpartition("/")[2] for name in OTHERS}
    assert not (snapshot(commands) / "model.safetensors").exists()
    # the token goes to the hub and never to its storage
    assert {r.authorization for r in hub.asked("/resolve/")} == {f"Bearer {TOKEN}"}
    assert {r.authorization for r in hub.asked("/storage/")} == {""}


def test_plan_fetches_the_config_alone(hub: HubStandIn, commands: Commands, tiny: Path) -> None:
    of_hub = commands.document("plan", REPO, "--tp", 2)
    assert of_hub == commands.document("plan", tiny, "--tp", 2)
    assert resolved(hub) == {"config.json"}
    assert hub.sent("/storage/") == 0


def test_shard_fetches_exactly_a_text_port_and_works_offline_after(
    hub: HubStandIn, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    port, reference = tmp_path / "port", tmp_path / "reference"
    commands.done("shard", f"{REPO}@main", "--out", port, "--tp", 2)
    commands.done("shard", tiny, "--out", reference, "--tp", 2)
    assert {path.name for path in snapshot(commands).iterdir()} == set(files_of(tiny))
    assert set(PAPERS) <= {path.name for path in (port / "source").iterdir()}
    for rank in ("rank-00.safetensors", "rank-01.safetensors"):
        assert (port / "weights" / rank).read_bytes() == (reference / "weights" / rank).read_bytes()
    record = json.loads((port / "port.json").read_text())
    assert record["source"] == {"kind": "hub", "uri": f"{REPO}@main", "revision": commit_of(1)}
    [weights] = json.loads((port / "source.json").read_text())["files"]
    assert weights["seen_at"] == f"{REPO}@{commit_of(1)}"

    before = len(hub.requests)
    of_folder = commands.document("inspect", tiny)
    offline = commands.having(HF_HUB_OFFLINE="1")
    assert offline.document("inspect", REPO) == of_folder
    # A commit never changes: nobody has to be asked.
    assert commands.document("inspect", f"{REPO}@{commit_of(1)}", "--values") == of_folder
    assert len(hub.requests) == before
    down = commands.having(HF_ENDPOINT="http://127.0.0.1:9")
    found = down.done("inspect", REPO, "--json")
    assert json.loads(found.stdout) == of_folder
    assert "warning: the hub cannot be reached" in found.stderr and commit_of(1) in found.stderr

    (snapshot(commands) / "NOTICE.txt").unlink()
    message = offline.refused(8, "shard", REPO, "--out", tmp_path / "other", "--tp", 2)
    assert "NOTICE.txt missing" in message and "HF_HUB_OFFLINE" in message


def test_a_branch_that_moved_is_another_port(
    hub: HubStandIn, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    commands.done("shard", REPO, "--out", tmp_path / "port", "--tp", 2)
    config = json.loads((tiny / "config.json").read_text()) | {"new": 1}
    changed = files_of(tiny) | {"config.json": json.dumps(config).encode()}
    hub.add(commit_of(2), changed)
    hub.requests.clear()
    message = commands.refused(2, "shard", REPO, "--out", tmp_path / "port", "--tp", 2)
    assert "another port" in message
    commands.done("inspect", REPO, "--values")
    assert {path.name for path in snapshot(commands, 2).iterdir()} == set(changed)
    # The weights are the same content: linked, not fetched a second time.
    assert [r for r in hub.asked("/storage/") if r.method == "GET" and r.sent > 100_000] == []


def test_an_index_says_which_files_are_fetched(
    hub: HubStandIn, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "many"))
    parts = write_sharded(folder, read_safetensors(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    hub.add(commit_of(3), files_of(folder), "parts")
    assert commands.document("inspect", f"{REPO}@parts")["findings"] == []
    commands.done("inspect", f"{REPO}@parts", "--values")
    fetched = {path.name for path in snapshot(commands, 3).glob("*.safetensors")}
    assert fetched == set(parts)


def test_a_broken_checkpoint_is_refused_before_its_weights_are_fetched(
    hub: HubStandIn, commands: Commands, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "broken"))
    tensors = read_safetensors(folder / "model.safetensors")
    lost = "model.language_model.layers.3.layer_scalar"
    del tensors[lost]
    write_sharded(folder, tensors, 1)
    (folder / "model.safetensors").unlink()
    hub.add(commit_of(4), files_of(folder), "broken")
    message = commands.refused(3, "shard", f"{REPO}@broken", "--out", tmp_path / "p", "--tp", 2)
    assert lost in message
    assert hub.sent("/storage/") < 20_000
    assert not (tmp_path / "p").exists()
    commands.refused(4, "shard", REPO, "--out", tmp_path / "p", "--tp", 3)
    assert hub.sent("/storage/") < 40_000


@pytest.mark.parametrize("other", ["adapter", "gguf"])
def test_other_formats_are_named_without_a_download(
    hub: HubStandIn, commands: Commands, other: str
) -> None:
    files = {
        "adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 10_000_000},
        "gguf": {"gemma-q4.gguf": b"GGUF" * 3_000_000},
    }
    hub.add(commit_of(5), files[other])
    found = commands.run("inspect", REPO)
    assert found.returncode == 3
    assert {"adapter": "merge", "gguf": "GGUF"}[other] in found.stdout
    assert hub.sent("/storage/") == 0


def test_a_cache_made_by_another_tool(hub: HubStandIn, commands: Commands, tiny: Path) -> None:
    """transformers leaves no list of the repository's files; the shared store of blobs makes links of links."""
    folder = snapshot(commands)
    folder.mkdir(parents=True)
    cache, blobs = folder.parent.parent.parent, folder.parent.parent / "blobs"
    (cache / "blobs" / "ab").mkdir(parents=True)
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    blobs.mkdir()
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text(commit_of(1))
    for number, (name, data) in enumerate(files_of(tiny).items()):
        (cache / "blobs" / "ab" / f"{number}").write_bytes(data)
        (blobs / f"{number}").symlink_to(f"../../blobs/ab/{number}")
        (folder / name).symlink_to(f"../../blobs/{number}")
    offline = commands.having(HF_HUB_OFFLINE="1")
    assert offline.document("inspect", REPO) == commands.document("inspect", tiny)
    assert hub.requests == []
