"""Servers that several tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_neuron.demo import demo_folder
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


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template knows tools: the bundled model's."""
    template = (demo_folder() / "chat_template.jinja").read_text(encoding="utf-8")
    return write_source(tmp_path_factory.mktemp("tools"), template=template)


@pytest.fixture(scope="module")
def rambling(tooled: Path) -> Iterator[RunningServer]:
    """Says anything: what is held to a schema is held by the server."""
    with running(tooled, FakeRunner(max_context=600)) as server:
        yield server
