"""The posts of a cluster's engine: where they are made, kept for the next worker, and ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.elastic.faults import NodeLost, ReplicaDownError
from gemma_neuron.elastic.head import Head
from gemma_neuron.elastic.post import Post, kill_post

POLL_SECONDS = 0.25
END_SECONDS = 10.0
POLITENESS = "RAY_worker_niceness"
"""Ray would run posts at nice 15, and their workers so too: on a machine with other work they starve, and miss their
heartbeats."""
Share = Mapping[str, float]
"""What a post takes of a machine, as Ray names it: CPU, GPU, memory (bytes), and others."""


@dataclass(slots=True)
class Remote:
    """A post, as its controller knows it. `address`: where other machines reach its own; `asked`: since when `pending`
    is; `missed`: since when it cannot be reached."""

    post: Any
    pid: int
    node: str
    address: str
    share: Share
    seen: int = 0
    pending: Any = None
    asked: float = 0.0
    missed: float | None = None
    busy: bool = False


class Posts:
    """Of the cluster that `head` leads; `ray` is the module, joined to it. `modules`: a post's arguments."""

    def __init__(self, ray: Any, head: Head, modules: Sequence[Any], start_seconds: float) -> None:
        self._ray, self._head, self._modules = ray, head, modules
        self._start_seconds = start_seconds
        self._kept: list[Remote] = []

    def kept(self, share: Share) -> int:
        """How many posts that take `share` wait for a worker."""
        return sum(remote.share == share for remote in self._kept)

    def keep(self, remote: Remote) -> None:
        """Its worker has ended, it is well: the next one starts there, from a server that has all loaded."""
        remote.busy = False
        self._kept.append(remote)

    def with_worker(self, spec: WorkerSpec, share: Share) -> tuple[Remote, int]:
        """A post with a new worker, and its pid. Raises NodeLost when no machine gives it a place in time, and what
        befell the worker."""
        while self._kept:
            remote = self._kept.pop()
            if remote.share == share:
                with suppress(self._ray.exceptions.RayError):
                    return remote, self._started(remote.post, spec)
            self.drop(remote.post)
        return self._new(spec, share)

    def _new(self, spec: WorkerSpec, share: Share) -> tuple[Remote, int]:
        known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {known[n]: v for n, v in share.items() if n in known}
        made = self._ray.remote(Post).options(
            **{**options, "memory": options.get("memory") or None},
            resources={name: value for name, value in share.items() if name not in known},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,
            runtime_env={"env_vars": {POLITENESS: "0"}},
        )
        post = None
        try:
            post = self._head.asked(lambda: made.remote(*self._modules))
            pid = self._started(post, spec)
            node, address, own_pid = self.got(post.where.remote(), self._start_seconds)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            if post is not None:
                self.drop(post)
            raise self._nowhere(spec, str(error).partition("\n")[0]) from error
        return Remote(post, own_pid, node, address, dict(share)), pid

    def _started(self, post: Any, spec: WorkerSpec) -> int:
        """The pid of a new worker. Raises what befell it."""
        pid: int | ReplicaDownError = self.got(post.start.remote(spec), self._start_seconds)
        if isinstance(pid, ReplicaDownError):
            self.drop(post)
            raise pid
        return pid

    def got(self, reference: Any, seconds: float) -> Any:
        """A call's answer; GetTimeoutError after `seconds`, or once the head is gone."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self._ray.get(reference, timeout=POLL_SECONDS)
            except self._ray.exceptions.GetTimeoutError:
                if time.monotonic() > end or self._head.is_gone():
                    raise

    def _nowhere(self, spec: WorkerSpec, said: str) -> NodeLost:
        why = (
            f"its head at {self._head} answers no more"
            if self._head.is_gone()
            else f"asked for {self._start_seconds:g} s; Ray: {said}"
        )
        return NodeLost(
            f"The cluster has no place for worker {spec.rank} ({spec.name}): {why}.",
            "`ray status` shows its machines and what is free.",
            rank=spec.rank,
        )

    def end(self, remote: Remote) -> None:
        """End it and its worker; returns when that is gone. On a machine that is cut off, it ends by itself."""
        try:
            self.got(remote.post.end.remote(), END_SECONDS)
        except self._ray.exceptions.RayError:
            self.kill(remote)
        self.drop(remote.post)

    def kill(self, remote: Remote) -> None:
        """By another process there: a post that is stopped does not hear that it is to end."""
        place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        if self._head.is_gone():
            return
        there = self._ray.remote(kill_post).options(
            num_cpus=0, scheduling_strategy=place(remote.node, soft=False)
        )
        with suppress(self._ray.exceptions.RayError):
            self.got(there.remote(remote.pid), END_SECONDS)

    def drop(self, post: Any) -> None:
        """Let the cluster end it."""
        with suppress(self._ray.exceptions.RayError, RuntimeError, TimeoutError):
            self._head.asked(lambda: self._ray.kill(post))
