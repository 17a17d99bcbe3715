"""What replicas there are: a process each, on a device of its own where devices are."""

from __future__ import annotations

import os

from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.tuning.plan import Supervision

PRELOAD = ("torch", "transformers", "peft", "gemma_neuron.tuning.replica")
STEADY = {"MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}
"""No library takes fewer threads than it was told: the order of its sums would follow the load."""


def specs(asked: Supervision, *, choose_device: bool = True) -> list[WorkerSpec]:
    """`choose_device`: whether each is to be told which device is its own; a cluster tells them."""
    return [
        WorkerSpec(
            rank=rank,
            name=f"replica {rank}",
            deadline=asked.hang_seconds,
            environment=STEADY | (_device(asked.device, rank) if choose_device else {}),
        )
        for rank in range(asked.replicas)
    ]


def _device(device: str, rank: int) -> dict[str, str]:
    """The device of replica `rank`, of those this process may use."""
    if device != "cuda":
        return {}
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": allowed.split(",")[rank].strip() if allowed else str(rank)}
