"""`tune --cluster` on a Ray cluster of two machines, which are two raylets of this one. tests/tuning/test_machines.py
has what needs no cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from gemma_neuron.errors import BackendUnavailableError, EnvironmentProblem, Interrupted
from gemma_neuron.tuning.plan import Progress
from tests.elastic import clusters
from tests.tuning.job import Job
from tests.tuning.test_machines import has_commit
from tests.tuning.test_tune import disturb

pytestmark = pytest.mark.timeout(1200)
BOUND, NODE_BOUND = 15.0, 60.0
"""From a fault to the step after it: of a process, whose post starts the next; of a machine, which has to be missed
first, and whose survivor may have to be started anew."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Room for one replica on each; the head, which the command itself joins, has none."""
    with clusters.two_machines(places=1, beside_head=True) as made:
        yield made


def raylet_of(pid: int) -> psutil.Process:
    """The daemon of the machine a worker runs on."""
    return next(found for found in psutil.Process(pid).parents() if found.name() == "raylet")


@clusters.NEEDS_RAY
def test_a_killed_replica_is_replaced_and_the_adapter_is_that_of_one_machine(
    job: Job, undisturbed: Job, machines: Any
) -> None:
    """Each on a machine of its own; rank 0, whose checkpoints came home, is killed."""
    raylets: list[int] = []
    kill = disturb(job, 0, signal.SIGKILL, when=has_commit)

    def look(where: Progress) -> None:
        if where.step == 1:
            raylets.extend(raylet_of(pid).pid for pid in job.pids().values())
        kill(where)

    pid = os.getpid()
    found = job.run(look, cluster=machines.address)
    assert len(set(raylets)) == 2 and os.getpid() == pid
    assert job.adapter == undisturbed.adapter
    assert job.losses() == undisturbed.losses()
    (fault,) = job.events("worker_died")
    assert (fault["rank"], fault["fault"]) == (0, "WorkerDied signal 9")
    (resumed,) = job.events("resumed")
    assert resumed["restored_step"] >= fault["committed"] >= 4
    assert (resumed["replicas"], found.restarts) == (2, 1)
    assert 0 < resumed["downtime_seconds"] < BOUND
    assert len([e for e in job.events("worker_started") if e["rank"] == 1]) == 1
    job.require_no_orphan()


@clusters.NEEDS_RAY
def test_sigterm_saves_and_one_machine_goes_on_from_it(
    job: Job, undisturbed: Job, machines: Any
) -> None:
    def stop(where: Progress) -> None:
        if where.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as ended:
        job.run(stop, cluster=machines.address)
    assert ended.value.exit_code == 75
    assert [e["step"] for e in job.events("committed")] == [4, 6]
    job.require_no_orphan()
    assert job.run(replicas=1).lost_steps == 0
    assert job.adapter == undisturbed.adapter


@clusters.NEEDS_RAY
def test_a_lost_machine_is_gone_on_without(job: Job, undisturbed: Job, machines: Any) -> None:
    """Its daemon is killed; the survivor goes on alone, from the commit that was here."""
    worlds: list[int] = []
    lost: list[tuple[float, str]] = []

    def look(where: Progress) -> None:
        worlds.append(where.replicas)
        if has_commit(where) and not lost:
            raylet = raylet_of(job.pids()[0])
            node = next(n for n in machines.list_all_nodes() if raylet.pid in _pids(n))
            lost.append((time.time(), node))
            raylet.kill()

    try:
        job.run(look, cluster=machines.address, elastic="resize", regrow_after=600.0)
    finally:
        machines.remove_node(lost[0][1], allow_graceful=False)
        machines.add_node(num_cpus=1)
    assert job.adapter == undisturbed.adapter and worlds[-1] == 1
    (fault,), (resumed,) = job.events("worker_died"), job.events("resumed")
    assert (fault["rank"], resumed["replicas"]) == (0, 1)
    assert resumed["restored_step"] >= fault["committed"] >= 4
    assert resumed["time"] - lost[0][0] < NODE_BOUND
    job.require_no_orphan()


def _pids(node: Any) -> list[int]:
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


@clusters.NEEDS_RAY
def test_a_cluster_that_is_not_there_is_said_first(job: Job) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot be joined"):
        job.run(cluster="127.0.0.1:9")
    assert not job.out.exists()


@pytest.mark.skipif(not clusters.NEEDS_RAY.args[0], reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it(job: Job) -> None:
    with pytest.raises(BackendUnavailableError) as refused:
        job.run(cluster="auto")
    assert refused.value.exit_code == 8 and "gemma-neuron[cluster]" in refused.value.hint
    assert not job.out.exists()
