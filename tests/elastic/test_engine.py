"""What every engine must do. Real processes, real signals; bounds are those of a loaded two-core machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import Engine, Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.faults import CollectiveAborted, WorkerDied, WorkerHung
from tests.elastic import clusters, work

DEATH_BOUND, RAY_DEATH_BOUND = 0.5, 2.0
ORPHAN_BOUND = 2.0
HANG_SLACK = 1.0
IMPORT_SECONDS = 240.0
"""For torch, by three workers at once beside whatever else runs. Peers would not wait for one that still imports it: a
group gives up after `group.COLLECTIVE_SECONDS`."""


@pytest.fixture
def embedded() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(preload=["tests.elastic.work"])
    yield made
    made.close()


@pytest.fixture(params=["embedded", pytest.param("ray", marks=clusters.NEEDS_RAY)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
        return
    with clusters.joined(request.getfixturevalue("cluster")) as made:
        yield made


def worker(engine: Engine, rank: int = 0, deadline: float = 10.0) -> WorkerHandle:
    return engine.spawn(WorkerSpec(rank=rank, name=f"worker {rank}", deadline=deadline))


def with_torch(engine: Engine, *ranks: int) -> list[WorkerHandle]:
    """Workers that have loaded it."""
    handles = [worker(engine, rank) for rank in ranks]
    for handle in handles:
        engine.call(handle, work.load_torch)
    waiting = set(handles)
    while waiting:
        outcomes = engine.wait(list(waiting), IMPORT_SECONDS)
        assert outcomes and not any(found.fault or found.error for found in outcomes), outcomes
        waiting -= {found.handle for found in outcomes}
    return handles


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_calls_keep_state_and_name_their_rank(engine: Engine) -> None:
    handles = [worker(engine, rank) for rank in range(3)]
    for expected in (5, 10):
        for handle in handles:
            engine.call(handle, work.add, 5)
        answers: list[Outcome] = []
        while len(answers) < 3:
            answers += engine.wait(handles, 5)
        assert [outcome.answer for outcome in answers] == [expected] * 3
    engine.call(handles[2], work.who)
    assert engine.wait(handles, 5)[0].answer == (2, handles[2].pid)


def test_what_a_call_raises_is_its_outcome_and_the_worker_lives(engine: Engine) -> None:
    handle = worker(engine)
    engine.call(handle, work.refuse, "no such bucket")
    (outcome,) = engine.wait([handle], 5)
    assert isinstance(outcome.error, ValueError) and str(outcome.error) == "no such bucket"
    engine.call(handle, work.add, 1)
    assert engine.wait([handle], 5)[0].answer == 1


@pytest.mark.parametrize(
    ("how", "signature"),
    [
        (-signal.SIGKILL, "WorkerDied signal 9"),
        (-signal.SIGSEGV, "WorkerDied signal 11"),
        (70, "WorkerDied exit 70"),
    ],
)
def test_a_death_is_an_exception_with_how_it_ended(
    engine: Engine, how: int, signature: str
) -> None:
    handle, other = worker(engine, 0), worker(engine, 1)
    engine.call(handle, work.end, how)
    (outcome,) = engine.wait([handle, other], 10)
    assert isinstance(outcome.fault, WorkerDied)
    assert outcome.fault.signature == signature
    assert (outcome.fault.rank, outcome.fault.pid) == (0, handle.pid)
    engine.call(other, work.add, 2)
    assert engine.wait([other], 5)[0].answer == 2


def test_a_death_is_seen_within_its_bound(engine: Engine) -> None:
    handle = worker(engine)
    engine.call(handle, work.sleep, 60.0)
    time.sleep(0.1)
    os.kill(handle.pid, signal.SIGKILL)
    killed = time.monotonic()
    (outcome,) = engine.wait([handle], 10)
    assert isinstance(outcome.fault, WorkerDied) and outcome.fault.signal == signal.SIGKILL
    bound = DEATH_BOUND if isinstance(engine, EmbeddedEngine) else RAY_DEATH_BOUND
    assert time.monotonic() - killed < bound


def test_a_stopped_worker_is_hung_and_then_gone(engine: Engine) -> None:
    handle = worker(engine, deadline=2.0)
    engine.call(handle, work.stop_self)
    started = time.monotonic()
    (outcome,) = engine.wait([handle], 30)
    assert isinstance(outcome.fault, WorkerHung)
    assert 2.0 <= time.monotonic() - started < 2.0 + HANG_SLACK
    assert gone(handle.pid, 1.0)


def test_a_long_call_under_its_deadline_is_no_hang(engine: Engine) -> None:
    handle = worker(engine, deadline=1.0)
    engine.call(handle, work.hold_interpreter, 2.0, 10.0)
    (outcome,) = engine.wait([handle], 20)
    assert outcome.answer == "held"
    engine.call(handle, work.hold_interpreter, 3.0)
    (outcome,) = engine.wait([handle], 20)
    assert isinstance(outcome.fault, WorkerHung), "the phase's deadline outlived its call"


def test_a_killed_worker_takes_its_compilers_along(engine: Engine, tmp_path: Path) -> None:
    handle = worker(engine)
    engine.call(handle, work.start_compiler, str(tmp_path / "pid"))
    child = _pid_in(tmp_path / "pid")
    os.kill(handle.pid, signal.SIGKILL)
    (outcome,) = engine.wait([handle], 10)
    assert isinstance(outcome.fault, WorkerDied)
    assert gone(child, ORPHAN_BOUND)


CONTROLLER = """
import os, pathlib, signal, sys, time
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerSpec
from tests.elastic import work
if __name__ == "__main__":
    engine = EmbeddedEngine(preload=["tests.elastic.work"])
    busy, stopped = (engine.spawn(WorkerSpec(rank=i, name="w")) for i in range(2))
    for worker in (busy, stopped):
        engine.call(worker, work.start_compiler, f"{sys.argv[1]}-{worker.spec.rank}")
    while not pathlib.Path(f"{sys.argv[1]}-1").exists():
        time.sleep(0.02)
    os.kill(stopped.pid, signal.SIGSTOP)
    print(busy.pid, stopped.pid, flush=True)
    time.sleep(600)
"""


def test_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER)
    controller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pid")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        text=True,
    )
    assert controller.stdout is not None
    pids = [int(text) for text in controller.stdout.readline().split()]
    pids += [_pid_in(tmp_path / f"pid-{rank}") for rank in range(2)]
    time.sleep(0.2)
    controller.kill()
    controller.communicate()
    killed = time.monotonic()
    assert all(gone(pid, killed + ORPHAN_BOUND - time.monotonic()) for pid in pids)


LOADING = """
import sys
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerSpec
if __name__ == "__main__":
    EmbeddedEngine(preload=[sys.argv[1]]).spawn(WorkerSpec(rank=0, name="w"))
"""


def test_a_server_that_still_loads_does_not_outlive_a_killed_controller(tmp_path: Path) -> None:
    script, told = tmp_path / "controller.py", tmp_path / "pid"
    script.write_text(LOADING)
    (tmp_path / "slow_to_import.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    paths = [str(tmp_path), str(Path.cwd()), *sys.path]
    controller = subprocess.Popen(
        [sys.executable, str(script), "slow_to_import"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    loading = _pid_in(told)
    controller.kill()
    controller.wait()
    assert loading != controller.pid and gone(loading, ORPHAN_BOUND)


def test_a_guard_that_is_stopped_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_neuron.elastic.embedded.REAP_SECONDS", 0.5)
    engine = EmbeddedEngine(preload=["tests.elastic.work"])
    engine.spawn(WorkerSpec(rank=0, name="w"))
    assert engine._guard is not None
    process = engine._guard[0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    engine.close()
    assert process.exitcode == -signal.SIGKILL


HOLDING = """
import os, signal
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerSpec
from tests.elastic import work
if __name__ == "__main__":
    engine = EmbeddedEngine(preload=["tests.elastic.work"])
    workers = [engine.spawn(WorkerSpec(rank=i, name="w")) for i in range(3)]
    for worker in workers:
        engine.call(worker, work.hold_semaphore)
        assert engine.wait([worker], 30)[0].fault is None
    os.kill(workers[0].pid, signal.SIGKILL)
    engine.call(workers[1], work.sleep, 60.0)
    for worker in workers[1:]:
        engine.kill(worker)
    engine.close()
"""


def test_locks_of_workers_are_put_away_without_a_word(tmp_path: Path) -> None:
    """Of one that was killed, one that is ended in a call, one that had answered."""
    script = tmp_path / "holding.py"
    script.write_text(HOLDING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, env=environment, text=True, check=True
    )
    assert ended.stderr == ""


def test_survivors_leave_a_broken_collective_at_once(engine: Engine, tmp_path: Path) -> None:
    handles = with_torch(engine, *range(3))
    for generation in range(3):
        for handle in handles:
            engine.call(handle, work.all_reduce, str(tmp_path), generation, 3, 10**9)
        for rank in range(3):
            eventually((tmp_path / f"running-{generation}-{rank}").exists)
        victim = handles[generation]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        faults: dict[WorkerHandle, Exception | None] = {}
        while len(faults) < 3:
            assert time.monotonic() - killed < 10, f"{faults} only"
            for outcome in engine.wait(handles, 1):
                faults[outcome.handle] = outcome.fault or outcome.error
        assert time.monotonic() - killed < ORPHAN_BOUND
        assert isinstance(faults.pop(victim), WorkerDied)
        assert all(isinstance(fault, CollectiveAborted) for fault in faults.values())
        (handles[generation],) = with_torch(engine, generation)


def test_sixty_deaths_leave_no_descriptor_behind(embedded: EmbeddedEngine) -> None:
    me = psutil.Process()
    for round_ in range(60):
        handle = worker(embedded)
        os.kill(handle.pid, signal.SIGKILL)
        assert embedded.wait([handle], 10)[0].fault is not None
        if round_ == 9:
            files, memory = me.num_fds(), me.memory_info().rss
    assert me.num_fds() <= files
    assert me.memory_info().rss < memory + 20_000_000


def _pid_in(file: Path) -> int:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if file.is_file() and (text := file.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written")
