"""Tiny models run fastest on one thread: the threads' meeting costs more than the work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemma_neuron.backends.cpu.backend import spin_less

spin_less()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
