"""Fresh copies of tiny checkpoints: made once a session, copied for each test that edits one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tiny import layer_types, write_tiny_gemma3, write_tiny_gemma4


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_tiny_gemma4(folder / "gemma4", layers=6)
    write_tiny_gemma3(folder / "gemma3")
    write_tiny_gemma4(
        folder / "e2b",
        layers=10,
        layer_types=layer_types(10, 5),
        num_kv_shared_layers=5,
        hidden_size_per_layer_input=8,
        use_double_wide_mlp=True,
        attention_k_eq_v=False,
        num_global_key_value_heads=None,
        num_key_value_heads=1,
    )
    return folder


@pytest.fixture
def gemma4(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "gemma4", tmp_path / "gemma4"))


@pytest.fixture
def gemma3(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "gemma3", tmp_path / "gemma3"))


@pytest.fixture
def e2b(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "e2b", tmp_path / "e2b"))
