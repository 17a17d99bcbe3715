"""Ranks are cut from the bytes the audit judged: a source that changes after it is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemma_neuron.errors import SourceChangedError
from gemma_neuron.pipeline import CompileRequest
from gemma_neuron.pipeline.prepare import prepare
from gemma_neuron.pipeline.sources import UNWATCHED, examined, open_any
from gemma_neuron.sharding.derived import Derived
from gemma_neuron.sharding.writer import write_ranks
from tests.sharding.shards import WhenRank, cut, write_family
from tests.tiny import read_safetensors, write_safetensors

TP = 2
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_family(tmp_path / "source", "31B")


def reorder(file: Path) -> None:
    """Another file of the same size: two tensors of one shape have changed places in it."""
    tensors = read_safetensors(file)
    first, second, *_ = (name for name in tensors if name.endswith("mlp.gate_proj.weight"))
    swap = {first: second, second: first}
    other = file.with_name("other")
    write_safetensors(other, {swap.get(n, n): tensors[swap.get(n, n)] for n in tensors})
    assert other.stat().st_size == file.stat().st_size
    other.replace(file)


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def become_link(file: Path) -> None:
    file.symlink_to(file.rename(file.parent.parent / "outside"))


def write_unseen(file: Path) -> None:
    """Another byte, and the time as it was: as `rsync --inplace -t` leaves it."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("change", [reorder, become_pipe])
def test_a_stopped_process_finds_another_source(
    tmp_path: Path, source: Path, change: Callable[[Path], None]
) -> None:
    """Stopped after its audit and before its first cut; continued, it neither hangs nor commits a rank."""
    out = tmp_path / "port"
    command = ["shard", str(source), "--out", str(out), "--tp", str(TP), "--verify"]
    child = subprocess.Popen(
        [sys.executable, "-m", "gemma_neuron", *command], stderr=subprocess.PIPE, text=True
    )
    while not (out / "port.json").exists() and child.poll() is None:
        time.sleep(0.0002)
    child.send_signal(signal.SIGSTOP)
    change(source / WEIGHTS)
    child.send_signal(signal.SIGCONT)
    _, told = child.communicate(timeout=60)
    assert child.returncode == 3, told
    assert "another file" in told or "is a pipe" in told
    assert not list(out.glob("weights/*.committed"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (reorder, "another file has taken its place"),
        (become_pipe, "is a pipe"),
        (become_link, "outside the checkpoint folder"),
        (write_unseen, "written to and its time put back"),
        (Path.unlink, "cannot be found"),
    ],
)
def test_a_source_that_changes_between_audit_and_cut(
    tmp_path: Path, source: Path, change: Callable[[Path], None], words: str
) -> None:
    request = CompileRequest(out=tmp_path / "port", backend="", tp=TP)
    prepared = prepare(str(source), request, None, UNWATCHED)
    audit, geometry = prepared.audit, prepared.audit.geometry
    assert geometry is not None
    change(source / WEIGHTS)
    with pytest.raises(SourceChangedError, match=words) as caught:
        derived = Derived(geometry)
        write_ranks(
            prepared.port, prepared.plan, audit.tensors(), audit.states, "", derived=derived
        )
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("change", [reorder, become_link, write_unseen, Path.unlink])
def test_a_source_that_changes_during_the_audit(
    source: Path, change: Callable[[Path], None]
) -> None:
    """What is read after the headers comes from the same files."""
    index = examined(open_any(str(source), UNWATCHED)).index
    change(source / WEIGHTS)
    with pytest.raises(SourceChangedError) as caught:
        index.read_bytes(next(iter(index.tensors.values())))
    assert caught.value.exit_code == 3


def test_bytes_written_during_the_run_with_the_time_put_back(tmp_path: Path, source: Path) -> None:
    """No port of ranks from before and after: the second rank does not count."""
    out, file = tmp_path / "port", source / WEIGHTS
    with pytest.raises(SourceChangedError, match="time put back"):
        cut(source, out, TP, WhenRank(1, lambda: write_unseen(file)))
    assert [path.name for path in out.glob("weights/*.committed")] == ["rank-00.committed"]
