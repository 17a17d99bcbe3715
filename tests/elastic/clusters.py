"""A Ray cluster of two machines, which are two raylets of this one. Skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gemma_neuron.elastic.cluster import RayEngine

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `cluster`)"
)
PLACES = 4
"""Workers that each machine has room for."""


@contextmanager
def two_machines(places: int = PLACES, *, beside_head: bool = False) -> Iterator[Any]:
    """The head is one of them, unless both are to be `beside_head`."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0 if beside_head else places, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(1 + beside_head):
        made.add_node(num_cpus=places, resources={"second": places})
    try:
        yield made
    finally:
        made.shutdown()


@contextmanager
def joined(cluster: Any, **more: Any) -> Iterator[RayEngine]:
    engine = RayEngine(cluster.address, preload=["tests.elastic.work"], **more)
    try:
        yield engine
    finally:
        engine.close()
