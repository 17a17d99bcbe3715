"""The engine for several machines: workers in posts, which are bare actors of a Ray cluster (extra `cluster`).

No actor is restarted by Ray: a lost worker is an outcome within milliseconds then, where Ray's own restart takes
seconds and leaves open whether the call ran. What Ray never tells of is bounded here: a node that is lost, a post that
is stopped, a head (GCS) that is gone, without which new actors would be waited for for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGKILL
from typing import Any

from gemma_neuron.elastic.census import Census
from gemma_neuron.elastic.engine import DEADLINE_SECONDS, Outcome, WorkerHandle, WorkerSpec
from gemma_neuron.elastic.faults import NodeLost, ReplicaDownError, WorkerDied, WorkerHung
from gemma_neuron.elastic.head import join
from gemma_neuron.elastic.post import SLICE_SECONDS, Reply, is_gone
from gemma_neuron.elastic.posts import END_SECONDS, POLL_SECONDS, Posts, Remote
from gemma_neuron.elastic.room import Room

START_SECONDS = 120.0
"""For a post and its worker, torch loaded first."""
NODE_SECONDS = 25.0
"""A post that cannot be reached for so long is lost with its node; Ray itself takes about 16 s to say so."""
CLUSTER_LIMIT = 1024


class RayEngine:
    """Workers on the machines of the cluster at `address` ("auto": the one this machine is part of).

    Each takes `cpus`, `gpus`, `memory` bytes and `resources` (such as neuron_cores) of a machine, by the cluster's own
    count. The toolkit is installed on all of them. `calls`: the modules of what they are called for: a post has them
    before it is asked anything, since one that imports from a cold disk gives no sign of life. `room`: how many workers
    there may be, whatever the cluster has.
    """

    def __init__(
        self,
        address: str = "auto",
        preload: Sequence[str] = (),
        *,
        calls: Sequence[str] = (),
        cpus: float = 1.0,
        memory: int = 0,
        resources: Mapping[str, float] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Join the cluster. Raises BackendUnavailableError without Ray, EnvironmentProblem without a cluster."""
        self._ray, self._head = join(address)
        self.census = Census(self._ray, self._head)
        self.room = Room(CLUSTER_LIMIT)
        modules = [*preload, *calls], list(calls)
        self._posts = Posts(self._ray, self._head, modules, start_seconds)
        self.cpus, self.memory, self.resources = cpus, memory, dict(resources or {})
        self.gpus = 0
        self._workers: dict[WorkerHandle, Remote] = {}

    def spawn(self, spec: WorkerSpec) -> WorkerHandle:
        """See `Engine.spawn`. Raises NodeLost when no machine gives it a place in time, and what befell the worker."""
        remote, pid = self._posts.with_worker(spec, self._share)
        handle = WorkerHandle(spec, pid)
        self._workers[handle] = remote
        return handle

    def address(self, handle: WorkerHandle) -> str:
        """Of the machine a worker is on, as the cluster's others reach it."""
        return self._workers[handle].address

    def call(self, handle: WorkerHandle, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Engine.call`. A worker that is gone is told of by `wait`."""
        worker = self._workers[handle]
        worker.busy = True
        with suppress(self._ray.exceptions.RayError):
            worker.post.call.remote(function, *arguments)

    def wait(self, handles: Sequence[WorkerHandle], timeout: float | None = None) -> list[Outcome]:
        """See `Engine.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            known = [handle for handle in handles if handle in self._workers]
            for handle in known:
                self._ask(self._workers[handle])
            left = POLL_SECONDS if end is None else min(POLL_SECONDS, end - time.monotonic())
            pending = [self._workers[handle].pending for handle in known]
            if pending:
                self._ray.wait(pending, num_returns=1, timeout=max(0.0, left))
            found = [outcome for handle in known if (outcome := self._look(handle)) is not None]
            if found or not known or (end is not None and time.monotonic() >= end):
                return found

    def _ask(self, worker: Remote) -> None:
        if worker.pending is None:
            worker.pending = worker.post.outcome.remote(worker.seen)
            worker.asked = time.monotonic()

    def _look(self, handle: WorkerHandle) -> Outcome | None:
        """What has become of one worker since the last look."""
        worker = self._workers[handle]
        if worker.pending is None:
            return None
        if not self._ray.wait([worker.pending], timeout=0)[0]:
            return self._silent(handle, worker)
        reference, worker.pending = worker.pending, None
        failures = self._ray.exceptions
        try:
            said: tuple[int, Reply] | None = self._ray.get(reference)
        except failures.ActorUnavailableError:
            return self._unreachable(handle, worker)
        except failures.RayActorError:
            return self._lost(handle, self._end_of(handle, worker))
        except failures.RayError as error:
            worker.busy, worker.seen = False, worker.seen + 1
            text = str(error).strip().splitlines()[-1]
            return Outcome(handle, error=RuntimeError(f"{handle.spec.name}: unreadable: {text}"))
        worker.missed = None
        if said is None:
            return None
        worker.seen, reply = said
        worker.busy = False
        kind, value = reply
        if is_gone(reply):
            self._posts.keep(self._workers.pop(handle))
            self.room.left()
            return Outcome(handle, fault=value)
        return Outcome(handle, **{kind: value})

    def _silent(self, handle: WorkerHandle, worker: Remote) -> Outcome | None:
        """A post that does not answer though it should have: stopped, or cut off with the head."""
        if self._head.is_gone():
            return self._lost(handle, self._cut_off(handle))
        silent = time.monotonic() - worker.asked
        if silent < max(handle.spec.deadline, DEADLINE_SECONDS) + SLICE_SECONDS:
            return None
        deadline = max(handle.spec.deadline, DEADLINE_SECONDS)
        fault = WorkerHung(
            rank=handle.spec.rank,
            pid=handle.pid,
            silent=silent,
            deadline=deadline,
            doing="its post answers no more",
        )
        self._posts.kill(worker)
        return self._lost(handle, fault)

    def _unreachable(self, handle: WorkerHandle, worker: Remote) -> Outcome | None:
        now = time.monotonic()
        worker.missed = now if worker.missed is None else worker.missed
        if now - worker.missed > NODE_SECONDS or self._head.is_gone():
            return self._lost(handle, self._cut_off(handle))
        time.sleep(POLL_SECONDS)  # it fails at once, and is asked again
        return None

    def _end_of(self, handle: WorkerHandle, worker: Remote) -> ReplicaDownError:
        """Why a post is gone: with its node, or alone; then its worker was killed by its lifeline."""
        if self._head.is_gone() or not self.census.is_up(worker.node):
            return self._cut_off(handle)
        spec = handle.spec
        return WorkerDied(
            rank=spec.rank, pid=handle.pid, code=-SIGKILL, doing="its post had ended before it"
        )

    def _cut_off(self, handle: WorkerHandle) -> NodeLost:
        return NodeLost(
            f"The machine of worker {handle.spec.rank} (pid {handle.pid} there) is lost to the cluster.",
            "`ray status` shows which machines are left.",
            rank=handle.spec.rank,
            pid=handle.pid,
        )

    def _lost(self, handle: WorkerHandle, fault: ReplicaDownError) -> Outcome:
        self._posts.drop(self._workers.pop(handle).post)
        self.room.left()
        return Outcome(handle, fault=fault)

    def busy(self, handle: WorkerHandle) -> bool:
        """See `Engine.busy`; False for a worker that is gone."""
        return handle in self._workers and self._workers[handle].busy

    def has(self, handle: WorkerHandle) -> bool:
        """See `Engine.has`."""
        return handle in self._workers

    def kill(self, handle: WorkerHandle) -> None:
        """See `Engine.kill`. On a machine that is cut off, its post ends it."""
        worker = self._workers.pop(handle, None)
        if worker is not None:
            self._posts.end(worker)
            self.room.left()

    @property
    def _share(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory, **self.resources}

    def capacity(self) -> int:
        """How many more workers the cluster's free resources and posts without one hold, and `room` allows."""
        allowed = self.room.free(len(self._workers))
        share = self._share
        return min(allowed, self.census.free(share) + self._posts.kept(share)) if allowed else 0

    def places(self) -> int:
        """How many workers its living machines hold in all, each taken for itself; free or not."""
        return self.census.places(self._share)

    def close(self) -> None:
        """End all workers and leave the cluster."""
        for handle in list(self._workers):
            self.kill(handle)
        with suppress(TimeoutError):
            self._head.asked(self._ray.shutdown, END_SECONDS)
