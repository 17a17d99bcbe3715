"""Checkpoints without marker, cut short or altered: removed or refused, and the one before them used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.artifacts import CommittedSet
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.faults import ElasticRuntimeError, WorkerDied
from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.tuning.checkpoints import Checkpoints, write_checkpoint
from gemma_neuron.tuning.commits import Commits
from gemma_neuron.tuning.patience import Patience

FILES = {"a": b"first" * 100, "b": b"second" * 100}


@pytest.fixture
def made(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        write_checkpoint(checkpoints.at(step), FILES, {"step": step})
    return checkpoints


def test_the_newest_is_taken_and_only_so_many_are_kept(made: Checkpoints) -> None:
    assert made.committed() == [30, 20, 10]
    found = made.recover()
    assert (found.step, found.facts, found.refused) == (30, {"step": 30}, {})
    made.prune(2)
    assert made.committed() == [30, 20] and not made.at(10).exists()


def test_what_has_no_marker_is_gone(made: Checkpoints) -> None:
    CommittedSet(made.at(30), "checkpoint").marker_path.unlink()
    (made.folder / "step-00000040").mkdir()
    (made.folder / "step-00000040" / "a.partial").write_bytes(b"half")
    (made.folder / "notes").mkdir()
    found = made.recover()
    assert (found.step, sorted(found.partial)) == (20, ["step-00000030", "step-00000040"])
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "notes",
        "step-00000010",
        "step-00000020",
    ]


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "manifest"])
def test_what_is_not_whole_is_named_and_the_one_before_used(made: Checkpoints, how: str) -> None:
    file = made.at(30) / ("checkpoint.manifest.json" if how == "manifest" else "b")
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    said: list[tuple[str, dict[str, Any]]] = []
    told: list[str] = []
    events = EventLog(lambda event, facts: said.append((event, facts)))
    commits = Commits(made, None, events, told.append, keep=3)
    assert commits.recover().step == commits.acknowledged == 20
    assert "step 30 is refused" in told[0] and file.name in told[0]
    assert [(event, facts["step"]) for event, facts in said] == [("checkpoint_refused", 30)]
    assert not made.at(30).exists()


def test_what_was_copied_from_another_run_or_step_is_no_checkpoint(tmp_path: Path) -> None:
    mine = Checkpoints(tmp_path / "checkpoints", "this run")
    whole = {"step": 10, "run": "this run", "threads": 1, "numerics": {"cpu": "x"}}
    write_checkpoint(mine.at(10), FILES, whole)
    for step, facts in (
        (20, whole),
        (30, whole | {"step": 30, "run": "another run"}),
        (40, whole | {"step": 40, "threads": "many"}),
        (50, whole | {"step": 50, "numerics": [1]}),
        (60, {"step": 60}),
    ):
        write_checkpoint(mine.at(step), FILES, facts)
    found = mine.recover()
    assert found.step == 10 and sorted(found.refused) == [20, 30, 40, 50, 60]
    assert "holds step 10 of run this run; step 20" in found.refused[20]
    assert "holds step 30 of run another run" in found.refused[30]
    assert mine.committed() == [10]


def test_a_step_that_is_committed_is_not_written_again(made: Checkpoints) -> None:
    before = (made.at(30) / "a").stat()
    write_checkpoint(made.at(30), {"a": b"other"}, {})
    assert (made.at(30) / "a").stat() == before


def test_patience_counts_failures_with_no_commit_between() -> None:
    kills = [0]
    patience = Patience(2, EventLog(), oom_kills=lambda: kills[0])
    fault = WorkerDied(rank=1, pid=7, code=-9)
    for commit in (10, 10, 20, 20):
        patience.count(fault, commit)
    with pytest.raises(ElasticRuntimeError, match="3 failures since the commit of step 20") as end:
        patience.count(fault, 20)
    assert end.value.__cause__ is fault
    kills[0] = 1
    patience.count(fault, 30)
    kills[0] = 2
    with pytest.raises(DoesNotFitError, match="want of memory"):
        patience.count(fault, 30)
