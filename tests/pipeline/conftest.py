"""One tiny model compiled for real, once for all tests of this folder; a store, with the bucket a module names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.pipeline import CompileRequest, PortResult, compile_port
from tests.sources.processes import clean_environment
from tests.sources.s3_servers import boto, moto, own_bucket, variables
from tests.tiny import write_tiny_gemma4

REQUEST: dict[str, Any] = {
    "backend": "cpu",
    "tp": 2,
    "dtype": "float32",
    "max_context": 48,
    "slots": 3,
    "buckets": (24,),
}

FLAGS = (
    "--backend cpu --tp 2 --dtype float32 --max-context 48 --slots 3 --buckets 24 --json".split()
)
"""The same for the command."""


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


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as address:
        yield address


@pytest.fixture
def client(server: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    with own_bucket(server, request.module.BUCKET) as own:
        yield own


@pytest.fixture(scope="module")
def address(server: str, request: pytest.FixtureRequest) -> str:
    """With the module's bucket, for all of its tests."""
    boto(server).create_bucket(Bucket=request.module.BUCKET)
    return server


@pytest.fixture
def uri(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """A prefix of the test's own, in a store that this process asks."""
    for name, value in (clean_environment() | variables(address)).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    return f"s3://{request.module.BUCKET}/{tmp_path.name}"
