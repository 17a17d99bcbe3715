"""Level 7: the package's tasks are whole, and what a port reaches in them is judged and reported."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from gemma_neuron.validation.levels.task import task_level
from gemma_neuron.validation.tasks import FOLDER, own_tasks
from tests.cli_process import run_main

HAVE_LM_EVAL = find_spec("lm_eval") is not None


@pytest.mark.parametrize("name", own_tasks())
def test_a_task_is_a_description_and_its_rows(name: str) -> None:
    described = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert described["task"] == name and described["test_split"] == "test"
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({json.dumps(row) for row in rows}) == len(rows) >= 20


def test_the_facts_have_one_right_sentence_of_four() -> None:
    lines = (FOLDER / "gemma_neuron_facts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(len(set(row["choices"])) == 4 > row["answer"] >= 0 for row in rows)
    assert {row["answer"] for row in rows} == {0, 1, 2, 3}


def test_the_packages_task_has_a_bar_and_a_stock_one_is_reported() -> None:
    stock = {"acc": 0.1, "samples": 10}
    good = task_level({"gemma_neuron_facts": {"acc": 0.95, "samples": 40}, "arc_easy": stock})
    assert good.status == "pass" and (good.level, good.name) == (7, "task")
    assert "gemma_neuron_facts acc 0.95 (40 asked); arc_easy acc 0.1 (10 asked)" in good.reason
    assert [figure.name for figure in good.figures] == ["gemma_neuron_facts, acc"]
    bad = task_level({"gemma_neuron_facts": {"acc": 0.25, "samples": 40}})
    assert bad.status == "fail" and "acc 0.25 (bar 0.60)" in bad.reason


def test_what_cannot_be_asked_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_main(capsys, "validate", tmp_path, "--task-limit", 3)
    assert done.code == 2 and "--task-limit without --tasks" in done.err
    done = run_main(capsys, "validate", tmp_path, "--tasks", "no_such_task")
    if HAVE_LM_EVAL:
        assert done.code == 2 and "there is no task 'no_such_task'" in done.err
    else:
        assert done.code == 8 and "pip install 'gemma-neuron[eval]'" in done.err
