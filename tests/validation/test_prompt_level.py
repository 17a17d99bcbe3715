"""Level 0's own rules on what ends an answer, on the bundled model's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.demo import demo_folder
from gemma_neuron.validation.context import LevelContext
from gemma_neuron.validation.levels import prompt


@pytest.mark.parametrize(
    ("stop_ids", "problems"),
    [
        ([1, 106, 50], []),
        ([106, 50], []),
        (
            [1, 106],
            ["the tool answer's begin '<|tool_response>' (id 50) is not among the stop ids"],
        ),
    ],
)
def test_what_must_stop_the_model(tmp_path: Path, stop_ids: list[int], problems: list[str]) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_folder() / name, tmp_path / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    assets = load_chat_assets(tmp_path)
    context = cast(LevelContext, SimpleNamespace(assets=assets))
    assert prompt._stop_problems(context) == problems
