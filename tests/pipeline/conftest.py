"""One tiny model compiled for real, once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.pipeline import CompileRequest, PortResult, compile_port
from tests.tiny import write_tiny_gemma4

REQUEST: dict[str, Any] = {
    "backend": "cpu",
    "tp": 2,
    "dtype": "float32",
    "max_context": 48,
    "slots": 3,
    "buckets": (24,),
}


def tiny_source(folder: Path, seed: int = 0) -> Path:
    """A sliding layer and a global one, window 8: seconds to compile."""
    return write_tiny_gemma4(folder, layers=2, seed=seed, sliding_window=8)


def compile_tiny(source: Path, out: Path, notes: list[str], **changes: Any) -> PortResult:
    request = CompileRequest(out=out, **REQUEST | changes)
    return compile_port(str(source), request, None, notes.append)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_source(tmp_path_factory.mktemp("source") / "a source")


@pytest.fixture(scope="session")
def port(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled port that tests read; those that change one copy it. Its name is one that people give a folder, and
    that a compiler's command line has to survive."""
    out = tmp_path_factory.mktemp("ports") / "it's a port"
    result = compile_tiny(source, out, [])
    assert (result.built, result.reused) == (3, 0)
    return out
