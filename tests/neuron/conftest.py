"""One tiny model, compiled for 8 ranks by the command with the stand-in SDK, for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neuron.against_stock import write_stock
from tests.neuron.flow import Done, compile_port, environment
from tests.tiny import write_tiny_gemma4

FLAGS = ("--dtype", "float32", "--max-context", 48, "--slots", 3, "--buckets", 24)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding and a global layer: 8 and 4 KV heads on 8 ranks."""
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return write_tiny_gemma4(folder, layers=2, sliding_window=8)


@pytest.fixture(scope="session")
def stock(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every port of `source` is compared with."""
    return write_stock(source, tmp_path_factory.mktemp("stock") / "stock.safetensors")


@pytest.fixture(scope="session")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(None, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def compiled(
    source: Path, sdk: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Done]:
    """A port that tests read; those that change one copy it. And what compiling it answered."""
    out = tmp_path_factory.mktemp("ports") / "port"
    done = compile_port(sdk, source, out, *FLAGS)
    assert done.code == 0, done.stderr
    return out, done
