"""`validate --tasks` on NeuronCores: a core belongs to one process until that ends."""

from __future__ import annotations

import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.backends.neuron import cores
from gemma_neuron.pipeline.tasks import TaskOptions, with_tasks
from gemma_neuron.reports import ValidationReport
from gemma_neuron.validation import tasks
from tests.neuron.flow import Done

Env = dict[str, str]


def test_the_server_has_ended_before_this_process_takes_the_cores(
    compiled: tuple[Path, Done], sdk: Env, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (sdk | {"XDG_STATE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    port = shutil.copytree(compiled[0], tmp_path / "port")
    order = []

    def ask(url: str, *_: object, chat: bool, **__: object) -> dict[str, Any]:
        """In lm-eval's place: whether the server answers, and who holds cores."""
        with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as answer:
            assert answer.status == 200 and chat
        assert [held.alive for held in cores.held()] == [True]
        assert cores.held()[0].pid != os.getpid()
        order.append("served")
        return {"gemma_neuron_facts": {"acc": 0.95, "samples": 40}}

    def judge() -> ValidationReport:
        order.append("judged")
        assert not cores.held()
        return ValidationReport(
            verdict="works", scope="chat", levels=(), token_match={}, first_divergence=None
        )

    monkeypatch.setattr(tasks, "run_tasks", ask)
    options = TaskOptions(names=("gemma_neuron_facts",))
    report = with_tasks(judge, port, options, base=False, progress=lambda _: None)
    assert order == ["served", "judged"]
    assert [(level.level, level.status) for level in report.levels] == [(7, "pass")]
    assert '"name": "task"' in (port / "validation.json").read_text()
