"""`tune --cluster` without a cluster: its calls, its store and its way home for checkpoints, on workers of this machine
that are given nothing of this process's disk but the model. tests/tuning/test_cluster.py has the cluster."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemma_neuron.checkpoint.audit import audit
from gemma_neuron.checkpoint.source import open_source
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerContext, WorkerHandle
from gemma_neuron.errors import EnvironmentProblem, Interrupted
from gemma_neuron.pipeline.replica_away import Origin, load_away
from gemma_neuron.tuning import machines, parcel
from gemma_neuron.tuning.away import Order
from gemma_neuron.tuning.numerics import Sameness, versions
from gemma_neuron.tuning.plan import Progress
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.replicas import PRELOAD
from tests.tiny import write_tiny_gemma4
from tests.tuning.job import Job
from tests.tuning.test_tune import disturb, resize

BOUND = 15.0
DEEP = 10_000
"""Bytes before the end of the weights: in the last layer's down_proj, behind its first 4096."""


def has_commit(where: Progress) -> bool:
    """A checkpoint has come home, which takes it a step or more."""
    return where.committed >= 4


class Machines(EmbeddedEngine):
    """Four cores each, on loopback."""

    cpus, gpus, memory = 1.0, 0, 0

    def __init__(self) -> None:
        super().__init__([*PRELOAD, "gemma_neuron.pipeline.replica_away"])
        self.census = SimpleNamespace(machines=lambda: [{"CPU": 4.0}] * 2)

    def address(self, handle: WorkerHandle) -> str:
        return "127.0.0.1"

    def places(self) -> int:
        return 8


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Machines:
    """What a run with an address joins; pieces are small, so that all that is sent comes in several."""
    made = Machines()

    @contextmanager
    def joined(address: str | None) -> Iterator[Machines | None]:
        yield made if address else None
        made.close()

    monkeypatch.setattr("gemma_neuron.pipeline.tuning.joined", joined)
    monkeypatch.setattr(parcel, "PIECE_BYTES", 5000)
    return made


@pytest.mark.parametrize(
    ("rank", "number", "after"),
    [(0, signal.SIGKILL, 0.0), (1, signal.SIGKILL, 0.03), (1, signal.SIGSTOP, 0.0)],
)
def test_a_lost_replica_is_replaced_and_the_adapter_is_that_of_one_machine(
    job: Job, undisturbed: Job, engine: Machines, rank: int, number: int, after: float
) -> None:
    pid = os.getpid()
    kill = disturb(job, rank, number, after, has_commit)
    found = job.run(kill, cluster="there", hang_after=2.0)
    assert job.adapter == undisturbed.adapter
    assert job.losses() == undisturbed.losses()
    (fault,) = job.events("worker_hung" if number == signal.SIGSTOP else "worker_died")
    assert fault["rank"] == rank and fault["committed"] >= 4
    (resumed,) = job.events("resumed")
    assert resumed["restored_step"] >= fault["committed"] and resumed["replicas"] == 2
    assert 0 < resumed["downtime_seconds"] < BOUND
    assert found.restarts == 1 and os.getpid() == pid
    survivor = [e["worker_pid"] for e in job.events("worker_started") if e["rank"] == 1 - rank]
    assert len(survivor) == 1, "it left its group by itself, and went on"
    job.require_no_orphan()


def test_what_is_acknowledged_is_here_when_the_machine_that_computed_it_is_lost(
    job: Job, undisturbed: Job, engine: Machines
) -> None:
    """All replicas are killed in the moment a step is said to be committed."""
    killed: list[int] = []

    def look(where: Progress) -> None:
        if where.committed == 8 and not killed:
            killed.append(where.step)
            for pid in job.pids().values():
                os.kill(pid, signal.SIGKILL)

    job.run(look, cluster="there")
    assert killed and [e["step"] for e in job.events("restored")] == [0, 8]
    assert job.adapter == undisturbed.adapter


def test_a_checkpoint_whose_packer_lives_comes_home_after_a_fault(
    job: Job, undisturbed: Job, engine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is lost while rank 0 still has the checkpoint of step 4."""
    collect = machines.Machines.collect

    def later(self: machines.Machines, *, wait: bool = False) -> None:
        if wait:
            collect(self, wait=True)

    monkeypatch.setattr(machines.Machines, "collect", later)

    def look(where: Progress) -> None:
        if where.step == 6 and not job.events("worker_died"):
            os.kill(job.pids()[1], signal.SIGKILL)

    job.run(look, cluster="there")
    assert [e["step"] for e in job.events("restored")] == [0, 4]
    assert job.adapter == undisturbed.adapter


def test_resize_goes_on_with_the_survivor_and_grows_back(
    job: Job, undisturbed: Job, engine: Machines
) -> None:
    resize(job, cluster="there")
    assert job.adapter == undisturbed.adapter


def test_sigterm_saves_and_one_machine_goes_on_from_it(
    job: Job, undisturbed: Job, engine: Machines
) -> None:
    def stop(where: Progress) -> None:
        if where.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as ended:
        job.run(stop, cluster="there")
    assert ended.value.exit_code == 75
    assert [e["step"] for e in job.events("committed")] == [4, 6]
    job.require_no_orphan()
    assert job.run(replicas=1).lost_steps == 0
    assert job.adapter == undisturbed.adapter


def test_a_checkpoint_that_cannot_be_written_here_ends_the_run(job: Job, engine: Machines) -> None:
    def stop(where: Progress) -> None:
        if where.step == 3:
            (job.out / "checkpoints").rmdir()
            (job.out / "checkpoints").write_text("in the way")

    with pytest.raises(OSError, match="checkpoints"):
        job.run(stop, cluster="there")
    assert not job.events("retry")
    job.require_no_orphan()


def test_replicas_and_threads_are_the_machines_own(
    job: Job, engine: Machines, undisturbed: Job
) -> None:
    found = job.run(cluster="there", replicas=None, threads=None)
    assert (found.replicas, engine.cpus) == (2, 4.0)


def test_a_replacement_with_another_byte_in_its_weights_is_refused(
    job: Job, engine: Machines, tmp_path: Path
) -> None:
    """A byte behind those that the checkpoint's digest is taken of."""
    job = Job(write_tiny_gemma4(tmp_path / "model", layers=3), job.asked.data, job.out)
    kill = disturb(job, 1, signal.SIGKILL)

    def look(where: Progress) -> None:
        if where.step == 6:
            (weights,) = job.model.glob("*.safetensors")
            data = bytearray(weights.read_bytes())
            data[len(data) - DEEP] ^= 1
            weights.write_bytes(data)
        kill(where)

    with pytest.raises(EnvironmentProblem, match=f"model on {platform.node()} has other weights"):
        job.run(look, cluster="there")
    assert [e["step"] for e in job.events("committed")] == [4]
    job.require_no_orphan()


class Quiet:
    """A worker's context that nobody listens to."""

    rank = 0

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def phase(self, doing: str, deadline: float | None = None) -> None: ...


def test_a_machine_with_other_packages_or_another_model_is_named(
    tune_model: Path, tmp_path: Path
) -> None:
    recipe = Recipe(steps=1, samples=1, last=1)
    order = Order(recipe=recipe, threads=1, device="cpu", versions=versions())
    digest = audit(open_source(str(tune_model))).checkpoint_digest
    context = cast(WorkerContext, Quiet())

    def refused(origin: Origin, order: Order = order) -> str:
        with pytest.raises(EnvironmentProblem) as found:
            load_away(origin, context, order)
        assert platform.node() in found.value.message
        return found.value.message

    other = write_tiny_gemma4(tmp_path / "other", layers=5)
    assert "is another checkpoint" in refused(Origin(text=str(other), digest=digest))
    assert "There is no folder" in refused(Origin(text=str(tmp_path / "none"), digest=digest))
    older = replace(order, versions={**versions(), "torch": "1.0"})
    said = refused(Origin(text=str(tune_model), digest=digest), older)
    assert "torch" in said and "1.0 there" in said


def test_machines_of_different_cpus_are_told_of_once() -> None:
    from gemma_neuron.elastic.events import EventLog

    told: list[str] = []
    events = EventLog()
    found = Sameness(events, told.append)
    for each in ([], [{"cpu": "avx2"}], [{"cpu": "avx2"}, {"cpu": "avx512"}]):
        found.look(each)
        found.look(each)
    assert events.counts == {"numerics_changed": 1}
    assert len(told) == 1 and "cpu avx2 and avx512" in told[0] and "bit-equal" in told[0]
    mixed = Sameness(events, told.append)
    mixed.look([{"cpu": "avx2"}, {"cpu": "avx512"}])
    assert told[1].startswith("warning: replicas have cpu avx2 and avx512")
    same = Sameness(events, told.append)
    same.begin(4, {"cpu": "avx2"})
    same.look([{"cpu": "avx2"}])
    assert len(told) == 2
