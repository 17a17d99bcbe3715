"""The whole way on the bundled model at tp 8, by the product's own commands on the stand-in SDK."""

from __future__ import annotations

import json
from pathlib import Path

from gemma_neuron.demo import demo_folder, demo_question
from gemma_neuron.port import Port
from tests.bundled.conftest import question_file
from tests.neuron.flow import asked, compile_port, run, serving
from tests.neuron.machines import devices, install, report

Env = dict[str, str]


def test_from_checkpoint_to_answer(sdk: Env, tmp_path: Path) -> None:
    """In bfloat16, the weights' layout chosen by the compiler. One question of each kind: all are the contract's."""
    port = tmp_path / "port"
    done = compile_port(sdk, demo_folder(), port, "--max-context", 1024)
    assert done.code == 0, done.stderr
    assert done.document["units"] == {"total": 5, "built": 5, "reused": 0}
    assert Port(port).spec.dtype == "bfloat16"
    _judged(sdk, port, question_file(tmp_path, 1))
    _served(install(tmp_path / "tools", devices(), report(), sdk), port)


def _judged(env: Env, port: Path, questions: Path) -> None:
    done = run(env, "gemma_neuron", "validate", port, "--questions", questions, "--json")
    assert done.code == 0, done.stdout + done.stderr
    found = done.document
    assert found["verdict"] == "works"
    assert [level["status"] for level in found["levels"]] == ["pass"] * 7
    assert found["token_match"]["compared"] > 100


def _served(env: Env, port: Path) -> None:
    """Behind the gate, twice: the first server left its cores."""
    messages = [{"role": "user", "content": demo_question()}]
    body = {"model": "demo", "messages": messages, "temperature": 0}
    for _ in range(2):
        with serving(env, port) as ready:
            answer = asked(f"{ready['url']}/v1/chat/completions", body)
            assert "Paris" in answer["choices"][0]["message"]["content"], json.dumps(answer)
