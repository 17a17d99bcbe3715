"""The cluster is started once for all tests on it: its daemons take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.elastic.clusters import two_machines


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    with two_machines() as made:
        yield made
