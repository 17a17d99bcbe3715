"""Faults among units: real deaths and hangs, what is tried again, what is given up, and what nobody else notices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from gemma_neuron.compilation.conditions import Conditions, Elsewhere, HostMemory, RunningUnit
from gemma_neuron.compilation.schedule import Schedule
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import NodeLost, PreemptionNotice, WorkerDied
from gemma_neuron.elastic.metadata import ENDPOINT, InstanceMetadata
from gemma_neuron.elastic.notice import FLUSH_SECONDS, Notices
from gemma_neuron.errors import CompileError, DoesNotFitError, Interrupted
from gemma_neuron.machine import HostBudget
from tests.compilation.units import SILENCE, Unit, build
from tests.elastic.imds_stand_in import Metadata

DEATH_BOUND = 0.5
HANG_SLACK = 1.0


def plenty() -> Conditions:
    return Conditions(HostMemory(HostBudget(10**15, "the test"), {}), Notices())


class Shop:
    """A schedule over a real engine, with all it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = EmbeddedEngine(preload=["tests.compilation.units"])
        self.said: list[tuple[float, str, dict[str, Any]]] = []
        self.told: list[str] = []

    def run(self, units: Mapping[str, tuple[str, ...]], most: int = 2) -> list[str]:
        made = [Unit(self.folder, name, tries) for name, tries in units.items()]
        events = EventLog(lambda what, facts: self.said.append((time.monotonic(), what, facts)))
        self.schedule: Schedule[Unit, str] = Schedule(self.engine, events, build, plenty(), most)
        return [end.result for end in self.schedule.run(made)]

    def of(self, what: str, unit: str) -> list[dict[str, Any]]:
        return [facts for _, said, facts in self.said if said == what and facts["unit"] == unit]

    @contextmanager
    def watching(self, metadata: Metadata) -> Iterator[Notices]:
        source = InstanceMetadata.here({ENDPOINT: metadata.url})
        with Notices(source, self.told.append, poll_seconds=0.05) as notices, notices.noting():
            yield notices

    def starts(self, name: str) -> int:
        return Unit(self.folder, name).starts


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.engine.close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("how", "event", "signature"),
    [
        ("signal SIGKILL", "worker_died", "WorkerDied signal 9"),
        ("exit 70", "worker_died", "WorkerDied exit 70"),
        ("crash exited-70", "compiler_failed", "exited-70"),
        ("signal SIGSTOP", "worker_hung", "WorkerHung"),
    ],
)
def test_a_unit_that_failed_once_is_tried_again_and_its_neighbours_are_not(
    shop: Shop, how: str, event: str, signature: str
) -> None:
    pid = os.getpid()
    units = {"decode": (how, ""), "prefill": ("sleep 0.3",), "score": ("",)}
    assert sorted(shop.run(units)) == ["decode", "prefill", "score"]
    assert [shop.starts(name) for name in units] == [2, 1, 1]
    assert os.getpid() == pid
    (fault,) = shop.of(event, "decode")
    assert fault["signature"] == signature
    first, second = shop.of("worker_started", "decode")
    assert fault["worker_pid"] == first["worker_pid"] != second["worker_pid"]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert fault["rank"] == 0 and not psutil.pid_exists(first["worker_pid"])
    bound = SILENCE + HANG_SLACK if event == "worker_hung" else DEATH_BOUND
    assert fault["seconds"] < bound + 0.5  # it began no sooner than its worker was started
    (resumed,) = shop.of("resumed", "decode")
    assert 0 < resumed["downtime_seconds"] < 5


@pytest.mark.fault("nxdi-13-g3-head256")
def test_the_same_end_twice_is_poison_and_the_others_are_finished_first(shop: Shop) -> None:
    units = {"decode": ("exit 70",), "prefill": ("sleep 0.3",), "score": ("",)}
    done: list[str] = []
    with pytest.raises(CompileError) as caught:
        done += shop.run(units, most=1)
    error = caught.value
    assert error.exit_code == 6
    assert "decode failed twice in the same way (WorkerDied exit 70)" in error.message
    assert str(shop.folder / "decode.log") in error.hint
    assert "exited with code 70" in (shop.folder / "decode.log").read_text()
    assert [shop.starts(name) for name in units] == [2, 1, 1]
    assert [failed.job.name for failed in shop.schedule.failed] == ["decode"]
    assert len(shop.of("poisoned", "decode")) == 1


def test_two_ends_of_different_kinds_are_no_poison(shop: Shop) -> None:
    assert shop.run({"decode": ("exit 70", "signal SIGSEGV", "crash stalled", "")}) == ["decode"]
    assert shop.starts("decode") == 4


class Farm(EmbeddedEngine):
    """Says of each worker that died that its machine was lost."""

    def wait(self, handles: Sequence[WorkerHandle], timeout: float | None = None) -> list[Outcome]:
        return [
            replace(found, fault=NodeLost("It is lost.", rank=0, pid=found.handle.pid))
            if isinstance(found.fault, WorkerDied)
            else found
            for found in super().wait(handles, timeout)
        ]


def test_machines_that_are_lost_say_nothing_against_the_unit(shop: Shop) -> None:
    shop.engine = Farm(preload=["tests.compilation.units"])
    assert shop.run({"decode": ("signal SIGKILL",) * 3 + ("",)}) == ["decode"]
    assert [fault["signature"] for fault in shop.of("worker_died", "decode")] == ["NodeLost"] * 3


class Full(EmbeddedEngine):
    """Has no place for more than `limit` workers."""

    def spawn(self, spec: WorkerSpec) -> WorkerHandle:
        if self.capacity() < 1:
            raise NodeLost("There is no place.", rank=spec.rank)
        return super().spawn(spec)


def test_where_there_is_no_place_for_another_unit_it_waits(shop: Shop) -> None:
    shop.engine = Full(preload=["tests.compilation.units"], limit=1)
    assert shop.run({"decode": ("sleep 0.3",), "score": ("",)}, most=2) == ["decode", "score"]
    assert len(shop.of("no_place", "score")) == 1


def test_where_there_is_no_place_at_all_it_is_said_at_once(shop: Shop) -> None:
    shop.engine = Full(limit=0)
    with pytest.raises(NodeLost, match="no place"):
        shop.run({"decode": ("",), "score": ("",)})


def test_what_was_printed_on_another_machine_is_in_the_log(shop: Shop) -> None:
    with pytest.raises(CompileError, match="odd"):
        shop.run({"decode": ("refuse odd",)})
    assert "printed elsewhere: odd\n" in (shop.folder / "decode.log").read_text()


def test_of_other_machines_places_admit_and_the_first_always_may() -> None:
    places = [2]
    memory = Elsewhere(lambda: places[0], 0)
    first, second = (cast(RunningUnit, object()) for _ in range(2))
    assert memory.admits("score", [first]) and not memory.admits("score", [first, second])
    places[0] = 0  # all machines lost: whether one comes back is for the cluster to say
    assert memory.admits("score", []) and not memory.admits("score", [first])


@pytest.mark.fault("cc-02-f137b")
def test_a_compiler_short_of_memory_is_tried_again_with_nothing_beside_it(shop: Shop) -> None:
    """The kernel's counters may not show it (another group's, no group at all): what the compiler said is enough."""
    units = {"decode": ("after prefill; crash killed", ""), "prefill": ("after decode; sleep 0.5",)}
    units |= {"score": ("sleep 0.2",)}
    assert sorted(shop.run(units, most=2)) == ["decode", "prefill", "score"]
    (retry,) = shop.of("retry", "decode")
    assert (retry["at_once"], retry["why"]) == (1, "killed")
    alone = shop.of("worker_started", "decode")[1]
    said = [facts for _, _, facts in shop.said]
    ended = [i for i, facts in enumerate(said) if facts["unit"] in ("prefill", "score")]
    assert said.index(alone) > max(ended)


@pytest.mark.parametrize(
    ("how", "says"), [("refuse too-large", "The graph is too-large."), ("break off", "ValueError")]
)
def test_what_another_try_would_meet_again_is_not_tried_again(
    shop: Shop, how: str, says: str
) -> None:
    with pytest.raises(CompileError, match=says):
        shop.run({"decode": (how,), "prefill": ("",)}, most=1)
    assert (shop.starts("decode"), shop.starts("prefill")) == (1, 1)


def test_every_failed_unit_is_named(shop: Shop) -> None:
    with pytest.raises(CompileError, match=r"decode failed twice.*Failed too: score\."):
        shop.run({"decode": ("exit 1",), "score": ("refuse odd",)}, most=1)


def test_an_error_of_the_caller_ends_what_runs(shop: Shop) -> None:
    units = [Unit(shop.folder, "decode"), Unit(shop.folder, "prefill", ("sleep 600",))]
    schedule: Schedule[Unit, str] = Schedule(shop.engine, EventLog(), build, plenty(), 2)
    running = schedule.run(units)
    next(running)
    children = psutil.Process().children(recursive=True)
    running.close()  # type: ignore[attr-defined]
    assert shop.engine.capacity() == shop.engine.room.limit
    assert len(psutil.Process().children(recursive=True)) < len(children)


def test_on_a_notice_no_unit_starts_and_what_ends_in_time_is_kept(
    shop: Shop, metadata: Metadata
) -> None:
    """The first unit is running when the notice comes and ends within it; the second is never started."""
    units = [
        Unit(shop.folder, "decode", ("sleep 1",)),
        Unit(shop.folder, "prefill", ("",)),
    ]
    done: list[str] = []
    with shop.watching(metadata) as notices, pytest.raises(PreemptionNotice) as caught:
        memory = HostMemory(HostBudget(10**15, "the test"), {})
        schedule: Schedule[Unit, str] = Schedule(
            shop.engine, EventLog(), build, Conditions(memory, notices), 1
        )
        metadata.take_away(FLUSH_SECONDS + 10)
        for end in schedule.run(units):
            done.append(end.result)
    assert caught.value.exit_code == 75
    assert done == ["decode"] and shop.starts("prefill") == 0


def test_on_a_recommendation_only_short_units_are_started(shop: Shop, metadata: Metadata) -> None:
    metadata.recommend()
    units = [Unit(shop.folder, "long"), Unit(shop.folder, "short")]
    done: list[str] = []
    with (
        shop.watching(metadata) as notices,
        pytest.raises(Interrupted, match="here: long") as caught,
    ):
        while not notices.cautious:
            time.sleep(0.02)
        memory = HostMemory(HostBudget(10**15, "the test"), {})
        conditions = Conditions(memory, notices, long=frozenset({"long"}))
        schedule: Schedule[Unit, str] = Schedule(shop.engine, EventLog(), build, conditions, 2)
        for end in schedule.run(units):
            done.append(end.result)
    assert caught.value.exit_code == 75
    assert done == ["short"] and shop.starts("long") == 0


def test_metadata_that_stops_answering_keeps_nothing_waiting_for_ever(
    shop: Shop, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a first compile every unit counts as long."""
    monkeypatch.setattr("gemma_neuron.elastic.notice.UNKNOWN_SECONDS", 2.0)
    with shop.watching(metadata) as notices:
        metadata.failing = True
        while notices.outlook != "unknown":
            time.sleep(0.02)
        started = time.monotonic()
        memory = HostMemory(HostBudget(10**15, "the test"), {})
        conditions = Conditions(memory, notices, long=frozenset({"decode"}))
        schedule: Schedule[Unit, str] = Schedule(shop.engine, EventLog(), build, conditions, 1)
        done = [end.result for end in schedule.run([Unit(shop.folder, "decode", ("sleep 0.5",))])]
    assert done == ["decode"] and time.monotonic() - started > 1.5
    assert any("answers no more" in line for line in shop.told)
    assert any("going on without notices" in line for line in shop.told)


class Killing(HostMemory):
    """Says of every worker that died that the kernel killed it."""

    def killed_by_kernel(self) -> bool:
        return True


@pytest.mark.parametrize("kills", [1, 2])
def test_one_kill_of_a_unit_alone_may_be_a_neighbours_fault(shop: Shop, kills: int) -> None:
    """It is tried once more; what is learnt from a second is what it was seen to take, not the whole budget."""
    budget = 2**40
    conditions = Conditions(Killing(HostBudget(budget, "the test"), {}), Notices())
    events = EventLog()
    schedule: Schedule[Unit, str] = Schedule(shop.engine, events, build, conditions, 1)
    units = [Unit(shop.folder, "decode", ("signal SIGKILL",) * kills + ("",))]
    if kills == 1:
        assert [end.result for end in schedule.run(units)] == ["decode"]
    else:
        with pytest.raises(DoesNotFitError, match="killed by the kernel"):
            list(schedule.run(units))
        (failed,) = schedule.failed
        assert failed.host_peak_bytes < budget / 2
    assert events.counts["oom_killed"] == kills and shop.starts("decode") == 2
