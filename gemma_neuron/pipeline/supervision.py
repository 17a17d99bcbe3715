"""How a run of `tune` is kept going, from what was asked for and what machines there are."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.errors import EnvironmentProblem, UsageError
from gemma_neuron.tuning.plan import Supervision

if TYPE_CHECKING:
    from gemma_neuron.elastic.cluster import RayEngine
    from gemma_neuron.pipeline.tuning import TuneRequest

Notice = Callable[[str], None]
NO_NEURON = (
    "Training on Inferentia2 has ended: the Neuron SDK does not support PyTorch/XLA training since 2.30, and the "
    "graphs that this toolkit builds for NeuronCores run forward only"
)


def supervision(request: TuneRequest, notice: Notice, engine: RayEngine | None) -> Supervision:
    """`engine`: of the cluster that the replicas are on, None for this machine; it is told what each of them takes.

    Raises UsageError, or EnvironmentProblem without peft.
    """
    devices = _cuda_devices if engine is None else lambda: _gpus(engine)
    device, count = _device(request, notice, devices)
    cores = [len(os.sched_getaffinity(0))] if engine is None else _cores(engine)
    replicas = request.replicas
    if replicas is None:
        replicas = max(1, count or len(cores))
    if device == "cuda" and replicas > count:
        raise UsageError(
            f"--replicas {replicas}: there are {count} CUDA devices, and each replica needs one of its own.",
            f"--replicas {count}",
        )
    threads = request.threads or max(1, min(cores) // math.ceil(replicas / len(cores)))
    if engine is not None:
        engine.cpus, engine.gpus = float(threads), int(device == "cuda")
    return Supervision(
        replicas=replicas,
        minimum=_minimum(request, replicas),
        save_every=request.save_every,
        keep=request.keep,
        regrow_seconds=request.regrow_after,
        hang_seconds=request.hang_after,
        max_failures=request.max_failures,
        wait_seconds=request.wait_for,
        device=device,
        threads=threads,
    )


def _minimum(request: TuneRequest, replicas: int) -> int | None:
    minimum = request.min_replicas
    if request.elastic == "pause" and minimum is not None:
        raise UsageError(
            "--min-replicas goes with --elastic resize; pause waits for all replicas.",
            "--elastic resize",
        )
    if request.elastic == "resize":
        minimum = 1 if minimum is None else minimum
        if not 1 <= minimum <= replicas:
            raise UsageError(
                f"--min-replicas {minimum} is not between 1 and --replicas {replicas}.",
                "Lower it.",
            )
    return minimum


def _device(request: TuneRequest, notice: Notice, devices: Callable[[], int]) -> tuple[str, int]:
    """cpu or cuda, and how many CUDA devices there are."""
    if request.device not in ("auto", "cpu", "cuda"):
        if request.device == "neuron":
            raise UsageError(f"--device neuron: {NO_NEURON}.", "--device cpu, or a GPU machine.")
        raise UsageError(f"--device {request.device} is none of auto, cpu, cuda.", "--device cpu")
    if importlib.util.find_spec("peft") is None:
        raise EnvironmentProblem(
            "`tune` puts its adapters on the model with peft, which is not installed.",
            "pip install 'gemma-neuron[tune]'",
        )
    count = devices() if request.device != "cpu" else 0
    if request.device == "cuda" and not count:
        where = (
            "torch sees no CUDA device here" if request.cluster is None else "the cluster has none"
        )
        raise UsageError(f"--device cuda: {where}.", "--device cpu")
    if request.device == "auto" and not count and Path("/dev/neuron0").exists():
        notice(f"device: cpu. {NO_NEURON}")
    return ("cuda" if count else "cpu"), count


def _cuda_devices() -> int:
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def _gpus(engine: RayEngine) -> int:
    return sum(int(machine.get("GPU", 0)) for machine in engine.census.machines())


def _cores(engine: RayEngine) -> list[int]:
    """Of each machine that has any for workers."""
    found = [int(machine.get("CPU", 0)) for machine in engine.census.machines()]
    return [cores for cores in found if cores] or [1]
