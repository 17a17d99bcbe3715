"""Tiny models run fastest on one thread: the threads' meeting costs more than the work. Which tests stay together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from gemma_neuron.backends.cpu.backend import spin_less

spin_less()

TOGETHER = ("tests/bundled/", "tests/pipeline/", "tests/neuron/")
"""Folders whose tests share one compiled port (their conftest.py); elsewhere the tests of a file share fixtures."""

APART = (
    "tests/neuron/test_bundled.py",
    "tests/neuron/test_scripts.py",
    "tests/neuron/test_watch.py",
)
"""Files of such a folder that do not use its port."""


def _group(path: str) -> str:
    if path in APART:
        return path
    return next((folder for folder in TOGETHER if path.startswith(folder)), path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long groups first, so that the processes of `scripts/test` end at about the same time."""
    order = {folder: number for number, folder in enumerate(TOGETHER)}
    items.sort(key=lambda item: order.get(_group(item.nodeid.partition("::")[0]), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Where pytest-xdist runs several processes, each group stays in one."""
    return _ByGroup(config, log)


class _ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # no types of its own
    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
