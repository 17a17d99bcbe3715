"""What replicas there are: a process each, on a device of its own where devices are."""

from __future__ import annotations

import importlib.metadata
import os

from gemma_neuron import machine
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.tuning.plan import Supervision

PRELOAD = ("torch", "transformers", "peft", "gemma_neuron.tuning.replica")
STEADY = {"MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}
"""No library takes fewer threads than it was told: the order of its sums would follow the load."""


def replica_manager(asked: Supervision, events: EventLog) -> Manager:
    """The embedded engine with its replicas; where the run goes on without one, its place stays empty for a while."""
    regrow = 0.0 if asked.minimum is None else asked.regrow_seconds
    return Manager(EmbeddedEngine(PRELOAD, asked.replicas, regrow), specs(asked), events)


def specs(asked: Supervision) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            rank=rank,
            name=f"replica {rank}",
            deadline=asked.hang_seconds,
            environment=STEADY | _device(asked.device, rank),
        )
        for rank in range(asked.replicas)
    ]


def _device(device: str, rank: int) -> dict[str, str]:
    """The device of replica `rank`, of those this process may use."""
    if device != "cuda":
        return {}
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": allowed.split(",")[rank].strip() if allowed else str(rank)}


def numerics(device: str) -> dict[str, str]:
    """What decides how floating-point sums come out, as far as it is known."""
    return {
        "device": device,
        "cpu": machine.cpu_capability(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }
