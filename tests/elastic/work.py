"""Calls that workers of these tests run: module-level, as `Engine.call` wants them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.elastic.group import gloo_group


def add(context: WorkerContext, value: int) -> int:
    """Keeps a running sum in the worker."""
    context.state["sum"] = context.state.get("sum", 0) + value
    return int(context.state["sum"])


def who(context: WorkerContext) -> tuple[int, int]:
    return context.rank, os.getpid()


def refuse(context: WorkerContext, text: str) -> None:
    raise ValueError(text)


def end(context: WorkerContext, how: int) -> None:
    """Exit with code `how`, or by signal `-how`."""
    if how < 0:
        os.kill(os.getpid(), -how)
        time.sleep(60)
    os._exit(how)


def hold_semaphore(context: WorkerContext) -> None:
    """As many libraries do when they are imported, for a lock between processes they never start."""
    context.state["lock"] = multiprocessing.get_context("spawn").Lock()


def sleep(context: WorkerContext, seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def stop_self(context: WorkerContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_interpreter(context: WorkerContext, seconds: float, deadline: float | None = None) -> str:
    """A C call that lets no other thread of the process run, as tracing or loading may be."""
    if deadline is not None:
        context.phase("holding the interpreter", deadline)
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


def start_compiler(context: WorkerContext, pids: str) -> None:
    """Start a grandchild that would run for minutes, tell its pid, and stay."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(str(child.pid))
    time.sleep(600)


def load_torch(context: WorkerContext) -> None:
    import torch.distributed  # noqa: F401


def all_reduce(context: WorkerContext, folder: str, generation: int, world: int, steps: int) -> int:
    """Sum over gloo ranks again and again."""
    import torch
    import torch.distributed as dist

    with gloo_group(Path(f"{folder}/store-{generation}"), context.rank, world):
        value = torch.ones(1)
        for step in range(steps):
            dist.all_reduce(value)
            value /= world
            if step == 0:
                Path(f"{folder}/running-{generation}-{context.rank}").touch()
    return int(value.item())


def train(context: WorkerContext, step: int, index: int, samples: list[float]) -> Any:
    """One data-parallel part: gradients of this rank's samples, by sample index."""
    return index, [sample * (step + 1) for sample in samples]
