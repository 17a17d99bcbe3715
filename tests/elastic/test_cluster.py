"""What only a cluster can meet: a machine that is lost, a head that is gone. Real daemons, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gemma_neuron.elastic.cluster import RayEngine
from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.elastic.faults import NodeLost, WorkerDied, WorkerHung
from gemma_neuron.errors import BackendUnavailableError, EnvironmentProblem
from tests.elastic import clusters, work

NODE_BOUND = 30.0
ORPHAN_BOUND = 5.0
AGAIN_BOUND = 2.0


def spec(rank: int = 0, deadline: float = 10.0) -> WorkerSpec:
    return WorkerSpec(rank=rank, name=f"worker {rank}", deadline=deadline)


def gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def post_of(pid: int) -> psutil.Process:
    """A worker's post: its forkserver's parent."""
    found = psutil.Process(pid).parents()[1]
    assert "Post" in found.name() or "Post" in " ".join(found.cmdline()), found
    return found


@clusters.NEEDS_RAY
def test_workers_have_the_priority_and_threads_of_what_started_the_cluster(cluster: Any) -> None:
    """By Ray's own defaults they would run 15 steps below, to starve beside other work, and with one thread."""
    with clusters.joined(cluster) as engine:
        mine, theirs = psutil.Process(), psutil.Process(engine.spawn(spec()).pid)
        assert theirs.nice() == mine.nice()
        assert theirs.environ().get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")


@clusters.NEEDS_RAY
def test_joining_a_cluster_leaves_sigterm_as_it_was(cluster: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with clusters.joined(cluster):
        assert signal.getsignal(signal.SIGTERM) is before


@clusters.NEEDS_RAY
def test_places_are_what_each_machine_holds_for_itself(cluster: Any) -> None:
    """Three of a machine's four each: two machines hold one worker each, though there is room for a third in sum."""
    with clusters.joined(cluster, cpus=3.0) as engine:
        assert engine.places() == 2
        engine.memory = 10**15
        assert engine.places() == engine.capacity() == 0


@clusters.NEEDS_RAY
def test_a_post_that_dies_or_stops_takes_its_worker_along(cluster: Any) -> None:
    with clusters.joined(cluster) as engine:
        for how, kind in ((signal.SIGKILL, WorkerDied), (signal.SIGSTOP, WorkerHung)):
            handle = engine.spawn(spec(deadline=2.0))
            engine.call(handle, work.sleep, 60.0)
            post = post_of(handle.pid)
            post.send_signal(how)
            (outcome,) = engine.wait([handle], 30)
            assert isinstance(outcome.fault, kind), outcome
            assert gone(handle.pid, ORPHAN_BOUND)


@clusters.NEEDS_RAY
def test_the_next_worker_starts_where_one_has_ended(cluster: Any) -> None:
    """In its post, which has all loaded: in a new one an interpreter would start and load torch again. Not where the
    next takes more of a machine."""
    with clusters.joined(cluster) as engine:
        room = engine.capacity()
        first = engine.spawn(spec())
        post = post_of(first.pid).pid
        engine.call(first, work.end, -signal.SIGKILL)
        (outcome,) = engine.wait([first], 30)
        assert isinstance(outcome.fault, WorkerDied) and engine.capacity() == room
        started = time.monotonic()
        second = engine.spawn(spec(1))
        assert time.monotonic() - started < AGAIN_BOUND
        assert post_of(second.pid).pid == post
        engine.call(second, work.who)
        assert engine.wait([second], 30)[0].answer == (1, second.pid)
        engine.call(second, work.end, 3)
        assert isinstance(engine.wait([second], 30)[0].fault, WorkerDied)
        engine.cpus = 2.0
        assert post_of(engine.spawn(spec()).pid).pid != post


@clusters.NEEDS_RAY
def test_a_machine_that_is_lost_is_an_outcome_and_the_others_go_on(cluster: Any) -> None:
    machine = cluster.add_node(num_cpus=1, resources={"third": 1})
    with (
        clusters.joined(cluster, resources={"third": 1}) as engine,
    ):
        handle = engine.spawn(spec())
        engine.call(handle, work.sleep, 120.0)
        assert engine.wait([handle], 0.5) == []
        raylet = next(
            info.process
            for kind, infos in machine.all_processes.items()
            if "raylet" in kind
            for info in infos
        )
        raylet.kill()
        killed = time.monotonic()
        (outcome,) = engine.wait([handle], 2 * NODE_BOUND)
        assert isinstance(outcome.fault, NodeLost), outcome
        assert time.monotonic() - killed < NODE_BOUND
        assert gone(handle.pid, ORPHAN_BOUND)
        assert engine.capacity() == 0  # the only machine with room for such
    cluster.remove_node(machine, allow_graceful=False)
    with clusters.joined(cluster) as engine:
        handle = engine.spawn(spec())
        engine.call(handle, work.add, 5)
        assert engine.wait([handle], 30)[0].answer == 5


HEADLESS = """
import sys, time
from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.elastic.faults import NodeLost
from tests.elastic import clusters, work
if __name__ == "__main__":
    with clusters.two_machines() as cluster, clusters.joined(cluster) as engine:
        spec = WorkerSpec(rank=0, name="worker 0")
        handle = engine.spawn(spec)
        engine.call(handle, work.sleep, 600.0)
        processes = cluster.head_node.all_processes
        next(i.process for kind, infos in processes.items() if "gcs" in kind for i in infos).kill()
        started = time.monotonic()
        (outcome,) = engine.wait([handle], 120)
        assert isinstance(outcome.fault, NodeLost), outcome
        try:
            engine.spawn(spec)
        except NodeLost as error:
            assert "answers no more" in error.message, error.message
        assert engine.capacity() == 0
        print(round(time.monotonic() - started, 1), flush=True)
"""


@clusters.NEEDS_RAY
def test_a_head_that_is_killed_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """In a process of its own: Ray ends those that lose their head, or hangs them."""
    script = tmp_path / "headless.py"
    script.write_text(HEADLESS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert float(ended.stdout.split()[-1]) < NODE_BOUND


@clusters.NEEDS_RAY
def test_no_room_and_no_cluster_are_said(cluster: Any) -> None:
    with clusters.joined(cluster, cpus=1000.0, start_seconds=2.0) as engine:
        assert engine.capacity() == 0
        with pytest.raises(NodeLost, match="no place for worker 0"):
            engine.spawn(spec())
    with pytest.raises(EnvironmentProblem, match="cannot be joined"):
        RayEngine("127.0.0.1:9")


@pytest.mark.skipif(not clusters.NEEDS_RAY.args[0], reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it() -> None:
    with pytest.raises(BackendUnavailableError, match="not installed"):
        RayEngine()
