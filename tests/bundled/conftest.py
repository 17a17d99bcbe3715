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
def validated(port: Path) -> tuple[Path, Done]:
    return port, gemma_neuron("validate", port, "--json")


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


@pytest.fixture(scope="session")
def few_questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's own question file with one question of each kind: enough where all answers are wrong."""
    head, *questions = (demo_folder() / "validation.toml").read_text().split("[[questions]]")
    first = {re.findall(r'^kind = "(.*)"', text, re.MULTILINE)[0]: text for text in questions[::-1]}
    assert len(first) > 4
    file = tmp_path_factory.mktemp("questions") / "few.toml"
    file.write_text(head + "".join(f"[[questions]]{text}" for text in first.values()))
    return file
