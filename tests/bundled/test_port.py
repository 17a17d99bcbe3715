"""The whole way on the bundled model: works, and is refused when it only seems to."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from gemma_neuron.demo import demo_folder
from tests.bundled.conftest import Done, compile_arguments, gemma_neuron


def test_the_bundled_model_works(validated: tuple[Path, Done]) -> None:
    _, done = validated
    assert done.code == 0, done.stdout + done.stderr
    report = done.document
    assert (report["verdict"], report["scope"]) == ("works", "chat")
    assert [level["status"] for level in report["levels"]] == ["pass"] * 7
    assert report["token_match"]["compared"] > 100


def test_a_second_compile_reuses_every_unit(port: Path) -> None:
    done = gemma_neuron(*compile_arguments(demo_folder(), port), "--json")
    assert done.code == 0, done.stderr
    assert done.document["units"] == {"total": 4, "built": 0, "reused": 4}


def test_a_second_validation_reuses_the_golden_looks_at_layers_and_writes_the_page(
    validated: tuple[Path, Done], some_questions: Path, tmp_path: Path
) -> None:
    port, first = validated
    page = tmp_path / "r.html"
    same = ("--questions", some_questions, "--json")
    again = gemma_neuron("validate", port, *same, "--drift", "--report", page).document
    assert again["provenance"]["golden"]["reused"] is True
    assert again["verdict"] == first.document["verdict"]
    assert again["drift"]["first"] is None and len(again["drift"]["layers"]) == 12
    html = page.read_text()
    assert "<h1>works (scope chat)</h1>" in html and "What is the capital of France?" in html
    assert again["provenance"]["golden"]["digest"] in html


def test_chat_answers(validated: tuple[Path, Done]) -> None:
    done = gemma_neuron("chat", validated[0], "--once", "What is the capital of France?")
    assert done.code == 0, done.stderr
    assert "Paris" in done.stdout
    assert "<" not in done.stdout


def test_lost_layer_scalars_are_warned_of_and_never_work(
    port: Path, lost_buffers: Path, few_questions: Path, tmp_path: Path
) -> None:
    """Mission, story 1: all 60 stayed at 1.0, no error, and the arithmetic was wrong."""
    inspected = gemma_neuron("inspect", lost_buffers, "--json")
    assert inspected.code == 0
    kinds = {f["kind"]: f for f in inspected.document["findings"]}
    assert kinds["all-one"]["severity"] == "warning"
    buffers = inspected.document["buffers"]
    assert len(buffers) == 12
    assert {(b["min"], b["max"]) for b in buffers} == {(1.0, 1.0)}

    out = tmp_path / "port"
    assert gemma_neuron("shard", lost_buffers, "--out", out, "--tp", 8).code == 0
    # The graphs do not depend on weights: those of the good port are reused as they are.
    shutil.copytree(port / "graphs", out / "graphs")
    compiled = gemma_neuron(*compile_arguments(lost_buffers, out), "--json")
    assert compiled.code == 0, compiled.stderr
    assert "all-one" in compiled.stderr
    assert compiled.document["units"]["reused"] == 4

    judged = gemma_neuron("validate", out, "--questions", few_questions)
    assert judged.code == 7
    first, second = judged.stdout.splitlines()[:2]
    assert first.startswith("matches-but-broken")
    assert "all-one" in second
    report = json.loads((out / "validation.json").read_text())
    statuses = {level["name"]: level["status"] for level in report["levels"]}
    assert statuses["logits"] == "pass" and statuses["reference"] == "fail"


def test_a_gemma_3_prompt_is_named_and_token_match_does_not_rescue_it(
    validated: tuple[Path, Done], few_questions: Path, tmp_path: Path
) -> None:
    port = tmp_path / "port"
    shutil.copytree(validated[0], port)
    wrong = ("--chat-template", "gemma-3", "--questions", few_questions)
    done = gemma_neuron("validate", port, *wrong, "--json")
    assert done.code == 7
    report = done.document
    assert report["verdict"] == "matches-but-broken"
    levels = {level["name"]: level for level in report["levels"]}
    assert levels["prompt"]["status"] == "fail"
    assert "<start_of_turn>" in levels["prompt"]["reason"]
    assert levels["logits"]["status"] == "pass"
    # Nothing it says is right, yet the tokens are the reference's: but for ties within bfloat16's noise.
    match = report["token_match"]
    assert match["equal"] >= 0.99 * match["compared"] > 100
    assert levels["generation"]["status"] == "pass"


def test_a_level_left_out_is_insufficient(port: Path, tmp_path: Path) -> None:
    copy = tmp_path / "port"
    shutil.copytree(port, copy)
    done = gemma_neuron("validate", copy, "--levels", "0-1", "--json")
    assert done.code == 7
    assert done.document["verdict"] == "insufficient"


def test_the_gate(port: Path, tmp_path: Path) -> None:
    copy = tmp_path / "port"
    shutil.copytree(port, copy)
    (copy / "validation.json").unlink(missing_ok=True)
    done = gemma_neuron("serve-local", copy, "--port", 0)
    assert done.code == 7
    assert "validate" in done.stderr


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (extra eval)")
def test_a_task_of_lm_eval_is_asked_over_http(port: Path, tmp_path: Path) -> None:
    copy = tmp_path / "port"
    shutil.copytree(port, copy)
    done = gemma_neuron(
        *("validate", copy, "--levels", "0", "--tasks", "gemma_neuron_facts", "--task-limit", 8),
        "--json",
    )
    assert done.code == 7, done.stderr  # one level of seven was looked at
    task = done.document["levels"][7]
    assert (task["name"], task["status"]) == ("task", "pass"), task
    assert task["detail"]["tasks"]["gemma_neuron_facts"] == {"acc": 1.0, "samples": 8}
    assert json.loads((copy / "validation.json").read_text())["levels"][7] == task
