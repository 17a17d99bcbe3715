"""What `shard` finds in a port is used only as far as it can be: damage is mended or named, never kept for ever."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.errors import DiskFullError, IntegrityError
from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from tests.cli_process import Ended, run_main
from tests.sharding.shards import cut, write_family

TP = 2
RECORD = "source.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("source"), "31B")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    out = tmp_path_factory.mktemp("whole") / "port"
    cut(source, out, TP)
    return out


@pytest.fixture
def port(tmp_path: Path, whole: Path) -> Port:
    return Port(shutil.copytree(whole, tmp_path / "port"))


def commit(port: Port, named: int = 1, **facts: object) -> None:
    """A manifest of rank 1 that vouches for what lies there."""
    known = port.rank_set(1).manifest()
    assert known is not None
    port.rank_set(1).commit([port.rank_file(named).name], known.facts | facts)


def link_away(port: Port) -> None:
    file = port.rank_file(1)
    file.symlink_to(file.rename(port.path.parent / "moved"))


def name_the_other_file(port: Port) -> None:
    commit(port, named=0)


def be_of_another_plan(port: Port) -> None:
    commit(port, plan="0" * 16)


def be_the_other_rank(port: Port) -> None:
    commit(port, rank=0)


def rename_a_dtype(port: Port) -> None:
    file = port.rank_file(1)
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    commit(port)


def change_a_buffer(port: Port) -> None:
    """Another layer_scalar, one the accounting refuses."""
    file = port.rank_file(1)
    with TensorFile(file) as opened:
        start = opened.tensors["layers.2.layer_scalar"].start
    data = bytearray(file.read_bytes())
    data[start + 1] ^= 1
    file.write_bytes(data)
    commit(port)


def pipe_for_a_manifest(port: Port) -> None:
    port.rank_set(1).manifest_path.unlink()
    os.mkfifo(port.rank_set(1).manifest_path)


@pytest.mark.parametrize(
    "damage",
    [
        link_away,
        name_the_other_file,
        be_of_another_plan,
        be_the_other_rank,
        rename_a_dtype,
        change_a_buffer,
        pipe_for_a_manifest,
    ],
)
def test_a_rank_that_cannot_be_used_is_cut_again(
    source: Path, whole: Path, port: Port, damage: Callable[[Port], None]
) -> None:
    damage(port)
    done = cut(source, port.path, TP)
    assert (done.built, done.reused) == (1, 1)
    assert port.rank_file(1).read_bytes() == Port(whole).rank_file(1).read_bytes()
    assert not port.rank_file(1).is_symlink()
    assert cut(source, port.path, TP, verify=True).reused == TP


def test_verify_names_the_byte_before_ranks_are_accounted_for(source: Path, port: Port) -> None:
    change_a_buffer(port)
    with pytest.raises(
        IntegrityError, match=r"layers\.2\.layer_scalar: rank 1 holds another byte 1 "
    ):
        cut(source, port.path, TP, verify=True)


@pytest.mark.parametrize(
    "record",
    [{"files": 3}, [{}], [3], None, {"a": 1}, {"files": [{"name": ["x"]}]}, {"files": [3]}, {}],
    ids=str,
)
def test_a_record_of_another_shape(
    capsys: pytest.CaptureFixture[str], source: Path, port: Port, record: Any
) -> None:
    """Named, and the hint works: without the record the ranks are compared and kept."""
    (port.path / RECORD).write_text(json.dumps(record))
    done = sharded(capsys, source, port)
    assert done.code == 5 and str(port.path / RECORD) in done.err and "Remove" in done.err
    (port.path / RECORD).unlink()
    assert cut(source, port.path, TP).reused == TP


def sharded(capsys: pytest.CaptureFixture[str], source: Path, port: Port) -> Ended:
    return run_main(capsys, "shard", source, "--out", port.path, "--tp", TP)


def test_a_wrong_digest_of_the_source_is_noticed_by_verify(source: Path, port: Port) -> None:
    record = json.loads((port.path / RECORD).read_text())
    record["files"][0]["blake3"] = "0" * 64
    (port.path / RECORD).write_text(json.dumps(record))
    with pytest.raises(IntegrityError, match="the blake3 0000"):
        cut(source, port.path, TP, verify=True)


def test_without_the_record_ranks_are_compared_with_the_source(tmp_path: Path, port: Port) -> None:
    """Other bytes further in than what tells checkpoints apart: nothing else says that the ranks are not of these."""
    other = write_family(tmp_path / "source", "31B")
    with TensorFile(other / "model.safetensors") as opened:
        place = opened.tensors["model.language_model.embed_tokens.weight"]
    with (other / "model.safetensors").open("r+b") as changed:
        changed.seek(place.start + place.bytes // 2 + 5000)
        changed.write(b"other")
    (port.path / RECORD).unlink()
    assert cut(other, port.path, TP, verify=True).built == 1


@pytest.mark.parametrize(
    "name",
    [
        "weights/rank-00.committed",
        "weights/rank-01.manifest.json",
        RECORD,
        "audit.json",
        "plan.json",
        "source/config.json",
    ],
)
def test_a_folder_where_a_file_belongs_is_named(
    capsys: pytest.CaptureFixture[str], source: Path, port: Port, name: str
) -> None:
    """And once it is away, the same command goes on."""
    path = port.path / name
    path.unlink()
    path.mkdir()
    done = sharded(capsys, source, port)
    assert done.code == 5, done.err
    assert str(path) in "".join(done.err.split("\n")) and "folder" in done.err
    path.rmdir()
    assert sharded(capsys, source, port).code == 0


def test_a_disk_that_is_full_before_the_first_rank(
    tmp_path: Path, source: Path, small_disk: Path
) -> None:
    out, filler = small_disk / "port", small_disk / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(small_disk)
        os.posix_fallocate(file.fileno(), 0, (free.f_bavail - 2) * free.f_frsize)
    with pytest.raises(DiskFullError, match=f"Writing {out}/.* failed: No space left") as caught:
        cut(source, out, TP)
    assert "it goes on" in caught.value.hint
    filler.unlink()
    assert cut(source, out, TP, verify=True).built == TP
