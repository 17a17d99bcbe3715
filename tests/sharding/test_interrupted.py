"""What happens to a `shard` that is killed, runs out of disk, or whose checkpoint changes under it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemma_neuron.errors import DiskFullError, EnvironmentProblem, SourceChangedError
from gemma_neuron.port import Port
from gemma_neuron.reassembly import TensorFile
from gemma_neuron.regular_files import FileState
from gemma_neuron.sharding.source_files import SourceFiles
from tests.sharding.shards import WhenRank, cut, cut_port, write_family

TP = 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_family(tmp_path / "source", "31B")


def markers(port: Path) -> list[str]:
    return sorted(path.name for path in port.glob("weights/*.committed"))


def committed(port: Path) -> dict[str, int]:
    return {name: (port / "weights" / name).stat().st_ino for name in markers(port)}


def test_a_killed_run_goes_on_and_writes_no_committed_rank_twice(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "31B", intermediate_size=8192)
    want = cut_port(source, tmp_path / "undisturbed", 8)
    out = tmp_path / "port"
    arguments = ["shard", str(source), "--out", str(out), "--tp", "8"]
    command = [sys.executable, "-m", "gemma_neuron", *arguments]
    kept: dict[str, int] = {}
    for rank, suffix in ((2, ".safetensors.partial"), (5, ".manifest.json")):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        awaited = out / "weights" / f"rank-{rank:02d}{suffix}"
        while not awaited.exists() and child.poll() is None:
            time.sleep(0.0002)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        now = committed(out)
        assert kept.items() <= now.items() and len(now) < 8
        kept = now
    assert kept
    done = subprocess.run(
        [*command, "--json", "--verify"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["units"] == {"total": 8, "built": 8 - len(kept), "reused": len(kept)}
    assert kept.items() <= committed(out).items()
    for rank in range(8):
        assert want.rank_file(rank).read_bytes() == Port(out).rank_file(rank).read_bytes()
    assert (out / "source.json").read_bytes() == (want.path / "source.json").read_bytes()
    assert not list(out.rglob("*.partial"))


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"else")


def replace(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy2(file, other)
    other.replace(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grow, "bytes and has"),
        (cut_short, "model.safetensors"),
        (rewrite, "written to"),
        (replace, "another file"),
        (Path.unlink, "cannot be found"),
    ],
)
def test_a_source_that_changes_during_the_run(
    tmp_path: Path, source: Path, change: Callable[[Path], None], words: str
) -> None:
    """The rank on its way does not count, those before it do; restored, the run goes on."""
    out, file, spare = tmp_path / "port", source / "model.safetensors", tmp_path / "spare"
    shutil.copy2(file, spare)
    with pytest.raises(SourceChangedError, match=words) as caught:
        cut(source, out, TP, WhenRank(2, lambda: change(file)))
    assert caught.value.exit_code == 3 and "committed ranks stay" in caught.value.hint
    assert markers(out) == ["rank-00.committed", "rank-01.committed"]
    assert not list(out.rglob("*.partial"))
    spare.replace(file)
    assert cut(source, out, TP, verify=True).reused == 2


def test_a_source_that_changed_before_it_had_its_digest(tmp_path: Path, source: Path) -> None:
    """Killed that early, a run leaves nothing that vouches for the source: the ranks themselves are compared."""
    out, file = tmp_path / "port", source / "model.safetensors"
    cut(source, out, TP)
    record = json.loads((out / "source.json").read_text())
    for key in ("blake3", "header", "names"):
        record["files"][0].pop(key)
    changes: list[tuple[Callable[[Path], object], int]] = [
        (Path.stat, 0),
        (os.utime, 0),
        (table_row, 1),
    ]
    for change, built in changes:
        (out / "source.json").write_text(json.dumps(record))
        change(file)
        assert cut(source, out, TP, verify=True).built == built


def table_row(file: Path) -> None:
    """Another byte in the third rank's part of the table, further in than what tells checkpoints apart."""
    with TensorFile(file) as opened:
        place = opened.tensors["model.language_model.embed_tokens.weight"]
    with file.open("r+b") as changed:
        changed.seek(place.start + place.bytes // 2 + 100)
        changed.write(b"other")


def test_a_touched_source_with_the_same_bytes_is_the_same(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "port"
    cut(source, out, TP)
    os.utime(source / "model.safetensors")
    assert cut(source, out, TP).reused == TP


def test_a_digest_is_not_taken_again(tmp_path: Path, source: Path) -> None:
    """The record of a file whose size and time are the same stands: a wrong digest in it is not noticed."""
    out = tmp_path / "port"
    cut(source, out, TP)
    record = json.loads((out / "source.json").read_text())
    record["files"][0]["blake3"] = "0" * 64
    (out / "source.json").write_text(json.dumps(record))
    assert cut(source, out, TP).reused == TP
    assert json.loads((out / "source.json").read_text()) == record


def test_a_read_error_names_file_and_place() -> None:
    """The kernel's own EIO: nothing is mapped at address 0 of a process."""
    memory = Path("/proc/self/mem")
    with (
        SourceFiles({memory: FileState.of(memory)}) as files,
        pytest.raises(EnvironmentProblem, match=r"/proc/self/mem at byte 0 failed: Input/output"),
    ):
        files.read_into(memory, memoryview(bytearray(16)), 0)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_cut(
    tmp_path: Path, small_disk: Path
) -> None:
    source = write_family(tmp_path / "source", "31B", intermediate_size=8192)
    with pytest.raises(DiskFullError, match=r"take [\d,]+ bytes; [\d,]+ are free") as caught:
        cut(source, small_disk / "port", TP)
    assert caught.value.exit_code == 8
    assert not list((small_disk / "port" / "weights").iterdir())


def test_a_disk_that_fills_up_during_the_run(source: Path, small_disk: Path) -> None:
    out, filler = small_disk / "port", small_disk / "filler"

    def fill() -> None:
        free = os.statvfs(small_disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)

    with pytest.raises(DiskFullError, match="No space left") as caught:
        cut(source, out, TP, WhenRank(1, fill))
    assert "what is committed stays" in caught.value.hint
    before = committed(out)
    assert list(before) in (["rank-00.committed"], ["rank-00.committed", "rank-01.committed"])
    assert not list(out.rglob("*.safetensors.partial"))
    filler.unlink()
    assert cut(source, out, TP, verify=True).reused == len(before)
    assert before.items() <= committed(out).items()


def test_a_limit_on_the_size_of_files(tmp_path: Path, source: Path) -> None:
    """As a user has it by `ulimit -f`."""
    limit = 300_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = ["shard", str(source), "--out", str(tmp_path / "port"), "--tp", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "gemma_neuron", *command],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    assert done.returncode == 8, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "DiskFullError" and "File too large" in error["message"]
    assert not markers(tmp_path / "port")
