"""`tune` with its replicas killed, stopped and taken away: the adapter is that of an undisturbed run, to the bit.

Real processes and signals, a tiny random Gemma 4. The controller is this process; a disturbance comes at a step that
`look` sees, or a moment after it, while the replicas are in the next one.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gemma_neuron.cli import app
from gemma_neuron.errors import Interrupted, PortMismatchError, SourceChangedError, UsageError
from gemma_neuron.pipeline import merged_checkpoint
from gemma_neuron.tuning.plan import Progress
from tests.tuning.job import Job, Look

BOUND = 15.0


def disturb(
    job: Job,
    rank: int,
    number: int,
    after: float = 0.0,
    when: Callable[[Progress], bool] = lambda where: where.step == 6,
) -> Look:
    """Send a signal to a rank once, after step 6 (or `when`), `after` seconds into the next."""
    done: list[int] = []

    def look(where: Progress) -> None:
        if not done and when(where):
            done.append(job.pids()[rank])
            timer = threading.Timer(after, os.kill, (done[0], number))
            timer.start()
            if not after:
                timer.join()

    return look


@pytest.mark.parametrize(
    ("rank", "number", "after"),
    [(0, signal.SIGKILL, 0.0), (1, signal.SIGKILL, 0.03), (1, signal.SIGSTOP, 0.0)],
)
def test_a_lost_replica_is_replaced_and_the_adapter_is_the_same_to_the_bit(
    job: Job, undisturbed: Job, rank: int, number: int, after: float
) -> None:
    pid = os.getpid()
    found = job.run(disturb(job, rank, number, after), hang_after=2.0)
    assert job.adapter == undisturbed.adapter
    assert job.losses() == undisturbed.losses(), "a step done again gives the loss it gave before"
    (fault,) = job.events("worker_hung" if number == signal.SIGSTOP else "worker_died")
    assert (fault["rank"], fault["committed"]) == (rank, 4) and fault["step"] >= 6
    (resumed,) = job.events("resumed")
    assert (resumed["restored_step"], resumed["replicas"]) == (4, 2)
    assert resumed["lost_steps"] == fault["step"] - 4 == found.lost_steps
    assert 0 < resumed["downtime_seconds"] < BOUND
    assert found.restarts == 1 and os.getpid() == pid
    job.require_no_orphan()


def resize(job: Job, **more: Any) -> None:
    """A run that loses rank 0, goes on with the other at once, and grows back at no failure's cost."""
    worlds: list[int] = []
    kill = disturb(job, 0, signal.SIGKILL)

    def look(where: Progress) -> None:
        kill(where)
        worlds.append(where.replicas)
        if where.step == 8 and where.replicas == 1:
            time.sleep(1.5)  # the place is free again by then

    job.run(look, elastic="resize", regrow_after=1.0, max_failures=1, **more)
    assert worlds[0] == worlds[-1] == 2 and 1 in worlds
    assert [e["kind"] for e in job.events("retry")] == ["failure", "scale_up"]


def test_resize_goes_on_without_the_lost_and_grows_back_at_a_commit(
    job: Job, undisturbed: Job
) -> None:
    resize(job)
    assert job.adapter == undisturbed.adapter
    smaller, larger = job.events("resumed")
    assert (smaller["replicas"], larger["replicas"], larger["lost_steps"]) == (1, 2, 0)
    assert smaller["downtime_seconds"] < 5.0
    job.require_no_orphan()


def test_sigterm_saves_and_the_same_command_goes_on_with_another_number_of_replicas(
    job: Job, undisturbed: Job
) -> None:
    def stop(where: Progress) -> None:
        if where.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as ended:
        job.run(stop)
    assert ended.value.exit_code == 75
    assert [e["step"] for e in job.events("committed")] == [4, 6]
    job.require_no_orphan()
    found = job.run(replicas=1)
    assert (found.lost_steps, job.adapter) == (0, undisturbed.adapter)
    again = job.run()
    assert again.replicas == 0 and again.digest == found.digest and "finished" in job.told[-1]


def test_altered_and_cut_checkpoints_are_named_and_the_one_before_used(
    job: Job, undisturbed: Job
) -> None:
    shutil.copytree(undisturbed.out, job.out)
    (job.out / "adapter.committed").unlink()
    last, before = (job.out / "checkpoints" / f"step-{n:08d}" for n in (14, 12))
    (last / "adapter.safetensors").write_bytes((last / "adapter.safetensors").read_bytes()[:-1])
    flipped = bytearray((before / "training.safetensors").read_bytes())
    flipped[-1] ^= 1
    (before / "training.safetensors").write_bytes(flipped)
    job.run(replicas=1)
    assert job.adapter == undisturbed.adapter
    refused = [line for line in job.told if "is refused" in line]
    assert [("step 14" in refused[0], "adapter.safetensors" in refused[0])] == [(True, True)]
    assert "step 12" in refused[1] and "training.safetensors" in refused[1]
    assert [e["step"] for e in job.events("restored")][-1] == 8


def test_another_machine_is_told_that_equality_ends(
    job: Job, undisturbed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(undisturbed.out, job.out)
    (job.out / "adapter.committed").unlink()
    monkeypatch.setattr("gemma_neuron.machine.cpu_capability", lambda: "avx2")
    job.run(replicas=1)
    assert any("cpu avx2" in line and "bit-equal" in line for line in job.told)
    assert job.events("numerics_changed")


def test_merge_takes_the_adapter(undisturbed: Job, tmp_path: Path) -> None:
    merged = merged_checkpoint(
        str(undisturbed.model), undisturbed.out, tmp_path / "merged", lambda line: None
    )
    assert merged.changed == 3 * 7 - 1, "the last layer's V is its K"


def test_a_folder_of_another_run_or_of_something_else_is_refused(
    undisturbed: Job, job: Job
) -> None:
    with pytest.raises(PortMismatchError, match=r"its learning_rate is 0\.0002, asked for is 0\.1"):
        undisturbed.run(learning_rate=0.1)
    job.out.mkdir()
    (job.out / "notes.txt").write_text("mine")
    with pytest.raises(PortMismatchError, match="holds files but no tune"):
        job.run()
    assert sorted(path.name for path in job.out.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"device": "neuron"}, "Training on Inferentia2 has ended"),
        ({"device": "tpu"}, "none of auto, cpu, cuda"),
        ({"targets": ("q_proj", "lm_head")}, "lm_head is no projection"),
        ({"min_replicas": 1}, "goes with --elastic resize"),
        ({"elastic": "resize", "min_replicas": 3}, "not between 1 and --replicas 2"),
        ({"max_length": 100_000}, "the model's 1024 positions"),
        ({"steps": None, "epochs": 0.0}, "is not one sample"),
        ({"rank": 65}, "--rank 65 is more than the model's width of 64"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    job: Job, more: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        job.run(**more)
    assert not job.out.exists()


@pytest.mark.parametrize(
    "flag",
    "--epochs=inf --epochs=nan --epochs=1e308 --steps=1000000000 --learning-rate=inf --learning-rate=nan "
    "--learning-rate=0 --dropout=nan --hang-after=inf --regrow-after=inf --batch=99999999 --threads=99999999 "
    "--seed=9223372036854775808".split(),
)
def test_a_number_that_no_run_bears_is_a_flag_refused(job: Job, flag: str) -> None:
    args = ["tune", str(job.model), "--data", str(job.asked.data), "--out", str(job.out), flag]
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2 and flag.split("=", maxsplit=1)[0] in found.output, found.output
    assert not job.out.exists()


def test_a_loss_that_is_no_number_ends_the_run(job: Job) -> None:
    with pytest.raises(UsageError, match=r"Step \d+ (has loss|leaves no finite adapter).*diverged"):
        job.run(replicas=1, learning_rate=1e30)
    job.require_no_orphan()


def test_a_model_that_changes_under_the_run_is_refused_to_a_replacement(
    job: Job, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(job.model, tmp_path / "changing"))
    job = Job(model, job.asked.data, job.out)

    def look(where: Progress) -> None:
        if where.step == 6:
            path = model / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-64:] = bytes(64)
            path.write_bytes(data)
            os.kill(job.pids()[1], signal.SIGKILL)

    with pytest.raises(SourceChangedError, match=r"model\.safetensors changed while this ran"):
        job.run(look)
    assert [e["step"] for e in job.events("committed")] == [4]
    job.require_no_orphan()


def test_a_failure_that_is_no_lost_replica_ends_the_run_and_every_replica(job: Job) -> None:
    def stop(where: Progress) -> None:
        if where.step == 3:
            shutil.rmtree(job.out / "checkpoints")
            (job.out / "checkpoints").write_text("in the way")

    with pytest.raises(OSError, match="checkpoints"):
        job.run(stop)
    assert not job.events("retry")
    job.require_no_orphan()
