"""A worker's post on a machine of a cluster: an actor that keeps one worker of the embedded engine.

The worker is a process of its own beside the actor, so that how it ended, its heartbeats and the end of all it
started are seen and done where it runs, by what does so on one machine; the cluster carries calls and outcomes only. A
post ends with the daemon that started it (Ray's raylet), and its worker with it: a lost node leaves nothing at work.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.faults import CollectiveAborted, ReplicaDownError

SLICE_SECONDS = 1.0
"""A post that is asked for an outcome answers at least this often: its own sign of life."""
LOOK_SECONDS, BREATH_SECONDS = 0.05, 0.002
"""How long the worker is looked at in one go, and the pause in which another call gets its turn."""
PARENT_SECONDS = 0.5
THREADS = "OMP_NUM_THREADS"
Reply = tuple[str, Any]
"""("answer" | "error" | "fault", its value)."""


class Post:
    """The actor's side, for one worker after another. `outcome` and one other call may run at once.

    `preload`, `calls`: as the engine has them.
    """

    def __init__(self, preload: Sequence[str] = (), calls: Sequence[str] = ()) -> None:
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        _forget_threads()
        for name in calls:
            importlib.import_module(name)
        self._engine = EmbeddedEngine(preload)
        self._lock = threading.Lock()
        self._handle: WorkerHandle | None = None
        self._kept: tuple[int, Reply] = (0, ("", None))

    def start(self, spec: WorkerSpec) -> int | ReplicaDownError:
        """The pid of the worker, or why there is none."""
        try:
            with _no_main():
                found = self._engine.spawn(spec)
        except ReplicaDownError as fault:
            return fault
        with self._lock:
            self._handle, self._kept = found, (self._kept[0], ("", None))
        return found.pid

    def where(self) -> tuple[str, str, int]:
        """The machine, by the cluster's name and by its address for it, and this post's pid there."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return node, str(ray.util.get_node_ip_address()), os.getpid()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call. A worker that is gone is told of by `outcome`."""
        with self._lock:
            if self._handle is not None and not is_gone(self._kept[1]):
                self._engine.call(self._handle, function, *arguments)

    def outcome(self, seen: int) -> tuple[int, Reply] | None:
        """The next outcome and its number, which rises by one each time; None when there is none within SLICE_SECONDS.

        `seen`: number of the last one that arrived; one that did not is told again.
        """
        end = time.monotonic() + SLICE_SECONDS
        while time.monotonic() < end:
            with self._lock:
                if self._kept[0] > seen:
                    return self._kept
                handles = [] if self._handle is None else [self._handle]
                for found in self._engine.wait(handles, LOOK_SECONDS):
                    self._kept = self._kept[0] + 1, _reply(found)
                    return self._kept
            time.sleep(BREATH_SECONDS if handles else LOOK_SECONDS)
        return None

    def end(self) -> None:
        """End the worker and all it started; returns when it is gone."""
        with self._lock:
            self._engine.close()
            self._handle = None


def kill_post(pid: int) -> None:
    """Run on a post's machine: kill it, though it be stopped, which keeps it from obeying the cluster."""
    with suppress(psutil.Error):
        post = psutil.Process(pid)
        if Post.__name__ in post.name():  # and no other that got its number since
            post.kill()


def is_gone(reply: Reply) -> bool:
    """Whether a reply was the worker's last: one that left a broken collective is well."""
    kind, value = reply
    return kind == "fault" and not isinstance(value, CollectiveAborted)


def _reply(found: Outcome) -> Reply:
    if found.fault is not None:
        return "fault", found.fault
    return ("answer", found.answer) if found.error is None else ("error", found.error)


@contextmanager
def _no_main() -> Iterator[None]:
    """Processes started within it do not run the cluster's own main program again, as multiprocessing would have it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _forget_threads() -> None:
    """Let workers see the machine's cores, as on any machine: Ray says one thread to whom its daemon said nothing.

    Compiled code keeps the number of threads that there were where it was compiled.
    """
    with suppress(psutil.Error):
        if THREADS not in psutil.Process(os.getppid()).environ():
            os.environ.pop(THREADS, None)


def _end_with_parent(parent: int) -> None:
    """End this process when its daemon has ended: the worker's lifeline ends with it."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)
