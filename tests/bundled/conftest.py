"""The bundled model, ported once by the installed commands at tp 8, for all tests of this folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.demo import demo_folder
from tests.tiny import decode, encode, read_safetensors, write_safetensors


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def gemma_neuron(*arguments: object) -> Done:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "gemma_neuron", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def compile_arguments(source: Path, out: Path) -> tuple[object, ...]:
    return ("compile", source, "--backend", "cpu", "--tp", 8, "--max-context", 1024, "--out", out)


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled and validated; the verdict is asserted in its own test."""
    out = tmp_path_factory.mktemp("bundled") / "port"
    done = gemma_neuron(*compile_arguments(demo_folder(), out), "--json")
    assert done.code == 0, done.stderr
    assert done.document["units"]["built"] == done.document["units"]["total"] == 4
    return out


@pytest.fixture(scope="session")
def validated(port: Path, some_questions: Path) -> tuple[Path, Done]:
    return port, gemma_neuron("validate", port, "--questions", some_questions, "--json")


@pytest.fixture(scope="session")
def lost_buffers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundled checkpoint whose `layer_scalar`s are all one, as after a lossy load."""
    folder = tmp_path_factory.mktemp("ones") / "model"
    shutil.copytree(demo_folder(), folder)
    tensors = read_safetensors(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layer_scalar"):
            values = decode(tensor)
            assert abs(float(values[0]) - 1) > 1e-3
            tensors[name] = encode(values * 0 + 1, tensor[0])
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def question_file(folder: Path, each: int) -> Path:
    """The checkpoint's own question file with the first `each` questions of each kind."""
    head, *questions = (demo_folder() / "validation.toml").read_text().split("[[questions]]")
    kinds: dict[str, list[str]] = {}
    for text in questions:
        (kind,) = re.findall(r'^kind = "(.*)"', text, re.MULTILINE)
        kinds.setdefault(kind, []).append(text)
    assert len(kinds) == 6 and all(len(found) >= each for found in kinds.values())
    kept = [text for found in kinds.values() for text in found[:each]]
    file = folder / "questions.toml"
    file.write_text(head + "".join(f"[[questions]]{text}" for text in kept))
    return file


@pytest.fixture(scope="session")
def some_questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of each kind: the whole file is scripts/quickstart's."""
    return question_file(tmp_path_factory.mktemp("some"), 2)


@pytest.fixture(scope="session")
def few_questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind: enough where all answers are wrong."""
    return question_file(tmp_path_factory.mktemp("few"), 1)
