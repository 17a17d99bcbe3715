"""What the long runs of `tune` measure with: their question file, their counting, their clock."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.artifacts import append_json_line
from gemma_neuron.validation.questions import read_questions
from scripts import soak_tune
from scripts.tune.compare_torchrun import Watched
from scripts.tune.learn_facts import write_data
from scripts.tune.tiny_job import Run


def test_the_new_facts_are_a_question_file_and_conversations(tmp_path: Path) -> None:
    data, questions = write_data(tmp_path)
    found = read_questions(questions)
    assert len(found.questions) == 20
    learned = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    sentences = {asked["content"]: answer["content"] for asked, answer in learned}
    for question in found.questions:
        assert question.answers[0] in sentences[question.prompt]


def test_a_run_that_was_not_disturbed_counts_and_has_failed() -> None:
    line = soak_tune.counted({"problems": []}, 0, [])
    assert line["outcome"] == "nothing was killed"
    assert soak_tune.progress([{"kind": "writer", **line}], "writer") == 1
    assert soak_tune.counted({"problems": []}, 3, [])["outcome"] == "ok"
    assert soak_tune.counted({"problems": ["a"]}, 3, ["b"])["outcome"] == "a; b"


def test_a_restart_from_before_what_was_acknowledged_is_found(tmp_path: Path) -> None:
    run = Run.__new__(Run)
    run.out = tmp_path
    for event, step in (("restored", 0), ("committed", 4), ("restored", 4), ("committed", 8)):
        append_json_line(tmp_path / "events.jsonl", {"event": event, "step": step})
    assert not soak_tune.went_back(run)
    append_json_line(tmp_path / "events.jsonl", {"event": "restored", "step": 4})
    assert soak_tune.went_back(run) == ["restored 4, acknowledged 8"]


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(("again", "lost"), [(11, 3), (14, 0)])
def test_a_step_under_way_at_the_kill_is_no_recovery(
    tmp_path: Path,
    rank: subprocess.Popen[bytes],
    job: subprocess.Popen[bytes],
    again: int,
    lost: int,
) -> None:
    log = tmp_path / "log.jsonl"

    def note(**line: Any) -> None:
        append_json_line(log, line)

    for step in range(1, 13):
        note(step=step)

    def go_on() -> None:
        rank.wait()
        note(step=13)
        time.sleep(0.3)
        begun.append(time.time())
        time.sleep(0.01)
        note(step=again)
        note(step=again + 1)

    begun: list[float] = []
    thread = threading.Thread(target=go_on)
    thread.start()
    found = Watched(job, lambda: {0: rank.pid}, log, lambda: begun).kill_and_wait(0, 20.0)
    thread.join()
    assert (found["outcome"], found["lost_steps"]) == ("recovered", lost)
    assert 0.3 <= found["seconds"] < 10
