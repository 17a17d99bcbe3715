"""Servers that several tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.fake_runner import FakeRunner
from tests.serving.server import SAID, RunningServer, running, script_of, write_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def free(folder: Path) -> Iterator[RunningServer]:
    """A server whose answers depend on the prompt."""
    with running(folder) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(folder: Path) -> Iterator[RunningServer]:
    """A server that always says SAID and ends its turn."""
    with running(folder) as probe:
        script = script_of(probe.assets, SAID)
    with running(folder, FakeRunner(script=script)) as server:
        yield server
