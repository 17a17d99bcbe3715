"""`elastic_retry` after real kills: same process, the right budget, the right replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import Outcome, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import (
    ElasticRuntimeError,
    PreemptionNotice,
    ScaleUpSignalError,
    WorkerDied,
    is_error_due_to_replica_down,
)
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.elastic.retry import ElasticRetryLimit, PoisonWatch, RetryPolicy
from tests.elastic import work

SAMPLES = [0.1 * n for n in range(12)]
STEPS = 6


class Trainer:
    """A small data-parallel job: per-sample results summed in a fixed order, a commit after each step."""

    def __init__(self, count: int) -> None:
        self.engine = EmbeddedEngine(preload=["tests.elastic.work"], limit=count)
        self.lines: list[tuple[str, dict[str, Any]]] = []
        events = EventLog(lambda event, fields: self.lines.append((event, fields)))
        specs = [WorkerSpec(rank=rank, name="trainer", deadline=3.0) for rank in range(count)]
        self.manager = Manager(self.engine, specs, events)
        self.committed: list[float] = []
        self.worlds: list[int] = []

    def run(self, at_step: Callable[[int], None] = lambda step: None) -> list[float]:
        while len(self.committed) < STEPS:
            step, workers = len(self.committed), self.manager.workers
            at_step(step)  # before the work: after it a killed worker may have answered already
            for index, handle in enumerate(workers):
                part = SAMPLES[index :: len(workers)]
                self.engine.call(handle, work.train, step, index, part)
            parts = dict(self._gather(len(workers)))
            ordered = [parts[n % len(workers)][n // len(workers)] for n in range(len(SAMPLES))]
            self.committed.append(sum(ordered))
            self.worlds.append(len(workers))
        return self.committed

    def _gather(self, count: int) -> Iterator[tuple[int, list[float]]]:
        found: list[Outcome] = []
        while len(found) < count:
            new = self.engine.wait(self.manager.workers, 10)
            assert new, "no worker answered"
            for outcome in new:
                if outcome.fault is not None:
                    raise outcome.fault
                assert outcome.error is None
            found += new
        return (outcome.answer for outcome in found)


@pytest.fixture
def trainer() -> Iterator[Callable[[int], Trainer]]:
    made: list[Trainer] = []

    def make(count: int) -> Trainer:
        made.append(Trainer(count))
        return made[-1]

    yield make
    for each in made:
        each.manager.close()


def undisturbed() -> list[float]:
    return [sum(sample * (step + 1) for sample in SAMPLES) for step in range(STEPS)]


class Once:
    """Do something at one step, the first time it comes."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action, self.done = step, action, False

    def __call__(self, step: int) -> None:
        if step == self.step and not self.done:
            self.done = True
            self.action()


@pytest.mark.parametrize("rank", [0, 1])
def test_pause_and_resume_after_a_kill(trainer: Callable[[int], Trainer], rank: int) -> None:
    job, pid = trainer(2), os.getpid()
    kill = Once(3, lambda: os.kill(job.manager.workers[rank].pid, signal.SIGKILL))
    run = job.manager.elastic_retry(poll_interval=0.05, timeout=20)(job.run)
    assert run(kill) == undisturbed()
    assert kill.done and job.worlds == [2] * STEPS and os.getpid() == pid
    retries = [fields for event, fields in job.lines if event == "retry"]
    assert [(r["kind"], r["rank"], r["fault"]) for r in retries] == [
        ("failure", rank, "WorkerDied signal 9")
    ]
    (resumed,) = [fields for event, fields in job.lines if event == "resumed"]
    assert 0 < resumed["downtime_seconds"] < 5
    assert job.manager.events.downtime_seconds == pytest.approx(
        resumed["downtime_seconds"], abs=1e-3
    )


def test_two_that_die_at_once_are_both_replaced(trainer: Callable[[int], Trainer]) -> None:
    """One look at the workers tells of both, and only one fault is what the attempt ends with."""
    job = trainer(3)

    def kill_two() -> None:
        for handle in job.manager.workers[:2]:
            os.kill(handle.pid, signal.SIGKILL)
        time.sleep(0.5)

    run = job.manager.elastic_retry(poll_interval=0.05, timeout=20)(job.run)
    assert run(Once(3, kill_two)) == undisturbed()
    assert job.worlds == [3] * STEPS
    assert [event for event, _ in job.lines].count("retry") == 1


def test_a_stopped_replica_is_replaced(trainer: Callable[[int], Trainer]) -> None:
    job = trainer(2)
    stop = Once(2, lambda: os.kill(job.manager.workers[1].pid, signal.SIGSTOP))
    run = job.manager.elastic_retry(poll_interval=0.05, timeout=20)(job.run)
    started = time.monotonic()
    assert run(stop) == undisturbed()
    assert time.monotonic() - started < 3.0 + 5.0
    assert "WorkerHung" in [fields.get("fault") for _, fields in job.lines]


def test_resize_goes_on_with_fewer_and_grows_back_without_spending_failures(
    trainer: Callable[[int], Trainer],
) -> None:
    job = trainer(3)

    def lose_one() -> None:
        job.engine.room.limit = 2
        os.kill(job.manager.workers[2].pid, signal.SIGKILL)

    def at_step(step: int, lose: Once = Once(1, lose_one)) -> None:  # noqa: B008
        lose(step)
        if step == 3:
            job.engine.room.limit = 3
        if step >= 4 and job.manager.inactive_replica_indices:
            _eventually(lambda: bool(job.manager.available_inactive_replicas))
            raise ScaleUpSignalError("capacity is back")

    policy = RetryPolicy(failures=ElasticRetryLimit(2))
    job.manager.start_monitoring(poll_interval=0.05)
    run = job.manager.elastic_retry(
        minimum_replica_count=1, poll_interval=0.05, timeout=20, retry_policy=policy
    )(job.run)
    assert run(at_step) == undisturbed()
    assert job.worlds == [3, 2, 2, 2, 3, 3]
    kinds = [fields["kind"] for event, fields in job.lines if event == "retry"]
    assert kinds == ["failure", "scale_up"]


def test_the_failure_budget_ends_it_and_names_the_last_fault(
    trainer: Callable[[int], Trainer],
) -> None:
    job, seen = trainer(1), []
    run = job.manager.elastic_retry(
        poll_interval=0.05,
        timeout=20,
        retry_policy=RetryPolicy(failures=ElasticRetryLimit(3)),
        on_elastic_event_callback=lambda kind, error: seen.append(kind),
    )(job.run)
    with pytest.raises(ElasticRuntimeError, match="3 failure events") as caught:
        run(lambda step: os.kill(job.manager.workers[0].pid, signal.SIGKILL))
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert seen == ["failure"] * 3


def test_ordinary_errors_and_machine_notices_go_through(
    trainer: Callable[[int], Trainer],
) -> None:
    job = trainer(1)
    for error in (ValueError("bad data"), PreemptionNotice("spot action", seconds=120)):

        @job.manager.elastic_retry(poll_interval=0.05)
        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            fail()
        assert caught.value is error
    assert not [event for event, _ in job.lines if event == "retry"]


def test_a_notice_for_one_replica_spends_the_preemption_budget(
    trainer: Callable[[int], Trainer],
) -> None:
    job = trainer(2)

    def notice() -> None:
        raise PreemptionNotice("node goes away", seconds=100, replica=1)

    policy = RetryPolicy(failures=ElasticRetryLimit(1))
    run = job.manager.elastic_retry(poll_interval=0.05, timeout=20, retry_policy=policy)(job.run)
    assert run(Once(2, notice)) == undisturbed()
    assert [fields["kind"] for event, fields in job.lines if event == "retry"] == ["preemption"]


def test_too_few_replicas_is_a_timeout_and_no_retry(trainer: Callable[[int], Trainer]) -> None:
    job = trainer(2)
    job.engine.room.limit = 1
    run = job.manager.elastic_retry(poll_interval=0.05, timeout=0.3)(job.run)
    with pytest.raises(TimeoutError, match="1 of 2 replicas"):
        run()


def test_a_fault_is_known_by_its_chain_not_by_text() -> None:
    fault = WorkerDied(rank=0, pid=1, code=-9)
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = fault
    assert is_error_due_to_replica_down(wrapped)
    assert not is_error_due_to_replica_down(RuntimeError("DATA_LOSS: worker died"))


def test_two_failures_of_the_same_kind_poison_a_unit() -> None:
    watch = PoisonWatch()
    assert not watch.count("decode", "exit 70")
    assert not watch.count("decode", "signal 9")
    assert not watch.count("prefill", "exit 70")
    assert watch.count("decode", "exit 70")


def _eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
