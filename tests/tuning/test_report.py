"""`tune --report`: the curve over all machines, each fault with its cost, nothing that a file said run as markup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gemma_neuron.artifacts import append_json_line, write_json_atomic
from gemma_neuron.errors import IntegrityError
from gemma_neuron.render.page.tuning import tune_page, write_tune_page
from gemma_neuron.tuning.checkpoints import Checkpoints, write_checkpoint
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.record import RunRecord
from gemma_neuron.tuning.story import read_story

EVENTS: list[dict[str, Any]] = [
    {"event": "started"},
    {"event": "restored", "step": 0, "lost_steps": 0},
    {"event": "worker_died", "step": 3, "why": "Worker 1 <b>died</b>"},
    {"event": "retry", "kind": "failure"},
    {"event": "restored", "step": 2, "lost_steps": 1},
    {
        "event": "resumed", "step": 3, "restored_step": 2, "lost_steps": 1, "replicas": 1,
        "downtime_seconds": 0.5,
    },
    {"event": "retry", "kind": "scale_up"},
    {"event": "restored", "step": 4, "lost_steps": 0},
    {
        "event": "resumed", "step": 5, "restored_step": 4, "lost_steps": 0, "replicas": 2,
        "downtime_seconds": 0.25,
    },
    {"event": "notice", "why": "Stopped by SIGTERM with work left."},
    {"event": "started"},
    {"event": "checkpoint_refused", "step": 5, "why": "another digest"},
    {"event": "restored", "step": 4, "lost_steps": 0},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    out = tmp_path / "adapter"
    out.mkdir()
    recipe = Recipe(steps=10, samples=4, last=40, batch=4)
    record = RunRecord(
        base="b" * 64, samples="s" * 64, recipe=recipe, model="tiny", data="<i>.jsonl"
    )
    write_json_atomic(out / "tune.json", record.model_dump(mode="json"))
    for event in EVENTS:
        append_json_line(out / "events.jsonl", event)
    for step, replicas in ((3, 2), (3, 1), (4, 1), (5, 2), (6, 2)):
        line = {"step": step, "loss": 1.0 / step, "replicas": replicas}
        append_json_line(out / "losses.jsonl", line)
    losses = np.array([1.0, 0.5, 1 / 3, 0.25], dtype=np.float32)
    checkpoint = Checkpoints(out / "checkpoints").at(4)
    write_checkpoint(checkpoint, {"training.safetensors": save({"losses": losses})}, {"step": 4})
    return out


def test_the_story_of_a_run_over_its_machines(run: Path) -> None:
    story = read_story(run)
    assert story.losses == pytest.approx([1.0, 0.5, 1 / 3, 0.25, 0.2, 1 / 6])
    assert story.replicas == [0, 0, 1, 1, 2, 2], "steps 1 and 2 were done elsewhere"
    assert (story.redone, story.unequal) == (1, 0)
    append_json_line(run / "losses.jsonl", {"step": 3, "loss": 0.3, "replicas": 2})
    assert read_story(run).unequal == 1
    found = [(i.kind, i.step, i.restored_step, i.lost_steps, i.replicas) for i in story.incidents]
    assert found == [
        ("fault", 3, 2, 1, 1),
        ("growth", 4, 4, 0, 2),
        ("notice", None, None, None, None),
        ("start", 4, 4, 0, None),
        ("refusal", 5, None, None, None),
    ]
    assert not story.done


def test_the_page_shows_it_and_runs_nothing(run: Path, tmp_path: Path) -> None:
    html = tune_page(read_story(run))
    assert "6 of 10 steps" in html and "not finished" in html
    assert "Worker 1 &lt;b&gt;died&lt;/b&gt;" in html and "<b>died" not in html
    assert "&lt;i&gt;.jsonl" in html and "<script" not in html
    assert html.count("<svg ") == 2 and "Loss by step" in html
    write_tune_page(read_story(run), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html


def test_a_run_without_a_step_has_a_page_and_no_run_has_none(run: Path, tmp_path: Path) -> None:
    (run / "losses.jsonl").unlink()
    Checkpoints(run / "checkpoints").drop(4)
    assert "No step was done yet." in tune_page(read_story(run))
    with pytest.raises(IntegrityError, match=r"has no tune\.json"):
        read_story(tmp_path)
