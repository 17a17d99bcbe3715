"""What a cluster's machines have and have left, by Ray's own count; nothing where its head is silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemma_neuron.elastic.head import Head

Wanted = Mapping[str, float]
"""Resource → how much of it one worker takes of a machine, as Ray names them: CPU, GPU, memory (bytes)."""


class Census:
    """Of the cluster that `head` leads; `ray` is the module, joined to it."""

    def __init__(self, ray: Any, head: Head) -> None:
        self._ray, self._head = ray, head

    def free(self, wanted: Wanted) -> int:
        """How many more workers the cluster's free resources hold."""
        return _hold(self._asked(self._ray.available_resources) or {}, wanted)

    def places(self, wanted: Wanted) -> int:
        """How many workers its living machines hold in all, each taken for itself; free or not."""
        return sum(_hold(machine, wanted) for machine in self.machines())

    def machines(self) -> list[Mapping[str, float]]:
        """The resources of each living machine."""
        return [row["Resources"] for row in self._rows() if row["Alive"]]

    def is_up(self, node: str) -> bool:
        """Whether the machine of this name (Ray's) lives."""
        return any(row["NodeID"] == node and row["Alive"] for row in self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return self._asked(self._ray.nodes) or []

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What the head says, None where it says nothing."""
        try:
            return None if self._head.is_gone() else self._head.asked(ask)
        except (self._ray.exceptions.RayError, RuntimeError, TimeoutError):
            return None


def _hold(found: Mapping[str, float], wanted: Wanted) -> int:
    return min(int(found.get(name, 0) / count) for name, count in wanted.items() if count > 0)
