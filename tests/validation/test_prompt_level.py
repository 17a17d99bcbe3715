"""Level 0 on the bundled model's files: what ends an answer, and each fault of a prompt that is level 0's to find."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.demo import demo_folder
from gemma_neuron.errors import IntegrityError
from gemma_neuron.port import Port
from gemma_neuron.validation.context import LevelContext
from gemma_neuron.validation.find import refuse_other_config
from gemma_neuron.validation.levels import prompt
from gemma_neuron.validation.validator import Options, validate
from scripts.mutants import prompt_faults  # noqa: F401  registers them
from scripts.mutants.base import FAULTS
from scripts.mutants.run import commit_again
from tests.eager import EagerRunner, eager_port

OF_LEVEL_6 = "thinking suffix missing"
"""The prompt is sound without it; what the model says to it is not."""


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


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Port:
    folder = tmp_path_factory.mktemp("sound") / "port"
    return eager_port(demo_folder(), folder, tp=1, slots=1, max_context=144, buckets=(64,))


@pytest.mark.parametrize(
    "name", [f.name for f in FAULTS.values() if f.kind == "prompt" and f.name != OF_LEVEL_6]
)
def test_what_is_wrong_with_a_prompt(name: str, sound: Port, tmp_path: Path) -> None:
    """Committed with the fault, so that digests agree; the checkpoint at hand is the sound one."""
    port = Port(shutil.copytree(sound.path, tmp_path / "port"))
    FAULTS[name].apply(port)  # type: ignore[call-arg, arg-type]
    commit_again(port)
    options = Options(checkpoint=demo_folder(), levels=frozenset({0}))
    found = validate(port, EagerRunner(port), options)
    assert found.levels[0].status == "fail", found.levels[0]


def test_stop_ids_make_no_other_checkpoint(sound: Port, tmp_path: Path) -> None:
    """What level 0 has to say of a port's stop ids is not lost to a refusal of the checkpoint they were taken from."""
    port = Port(shutil.copytree(sound.path, tmp_path / "port"))
    FAULTS["stop list reduced to <eos>"].apply(port)  # type: ignore[call-arg, arg-type]
    config = port.source_folder / "config.json"
    refuse_other_config(demo_folder(), config)
    changed = json.loads(config.read_text()) | {"rope_theta": 7.0}
    config.write_text(json.dumps(changed))
    with pytest.raises(IntegrityError, match="not the one the port was made from"):
        refuse_other_config(demo_folder(), config)
