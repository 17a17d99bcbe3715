"""What can happen to a worker, as exceptions in the controller. Nothing is told apart by message text.

    ReplicaDownError        the replica is gone; its work can be done again by another
      WorkerDied            the process ended: rank, pid, signal or exit code
      WorkerHung            alive, but no heartbeat within its deadline (killed when this is raised)
      CollectiveAborted     a peer left in the middle of a collective
      NodeLost              the machine it ran on does not answer
    PreemptionNotice        planned: the machine, or a replica's, will be taken away
    ScaleUpSignalError      raised by user code at a committed boundary, to use replicas that came back
    ElasticRuntimeError     the retry budget is spent; chained from the last fault

The names are those of pathwaysutils' elastic manager where it has one.
"""

from __future__ import annotations

import signal as signals
from typing import Any

from gemma_neuron.errors import EnvironmentProblem, GemmaNeuronError, Interrupted


class ReplicaDownError(EnvironmentProblem):
    """A replica is gone. `rank`: which one; `pid`: of its process, 0 where none is known."""

    def __init__(self, message: str, hint: str = "", *, rank: int, pid: int = 0) -> None:
        super().__init__(message, hint)
        self.rank, self.pid = rank, pid

    @property
    def signature(self) -> str:
        """What makes two faults the same fault: kind and how it ended, not who or when."""
        return type(self).__name__

    def facts(self) -> dict[str, Any]:
        """Fields of the event that tells of it."""
        return {"rank": self.rank, "worker_pid": self.pid, "fault": self.signature}


class WorkerDied(ReplicaDownError):
    """The process ended without an answer. Exactly one of `exit_code_seen` and `signal` is set."""

    def __init__(self, *, rank: int, pid: int, code: int, doing: str = "") -> None:
        self.signal = -code if code < 0 else None
        self.exit_code_seen = code if code >= 0 else None
        super().__init__(
            f"Worker {rank} (pid {pid}) {how_it_ended(code)}{' while ' + doing if doing else ''}.",
            "If the kernel killed it, memory ran out; see events.jsonl.",
            rank=rank,
            pid=pid,
        )

    @property
    def signature(self) -> str:
        ended = f"exit {self.exit_code_seen}" if self.signal is None else f"signal {self.signal}"
        return f"WorkerDied {ended}"


class WorkerHung(ReplicaDownError):
    """No heartbeat for `silent_seconds`, more than the `deadline` of what it was doing."""

    def __init__(self, *, rank: int, pid: int, silent: float, deadline: float, doing: str) -> None:
        self.silent_seconds, self.deadline = silent, deadline
        super().__init__(
            f"Worker {rank} (pid {pid}) gave no sign of life for {silent:.1f} s "
            f"(deadline {deadline:g} s) while {doing or 'idle'}; it was killed.",
            rank=rank,
            pid=pid,
        )


class CollectiveAborted(ReplicaDownError):
    """A collective broke because a peer left; this worker itself is well."""


class NodeLost(ReplicaDownError):
    """The machine a worker ran on is gone."""


class PreemptionNotice(Interrupted):
    """Planned: `replica` (None: this machine) goes away in about `seconds`."""

    def __init__(self, why: str, *, seconds: float, replica: int | None = None) -> None:
        super().__init__(f"{why}; {seconds:.0f} s are left.", "Run the same command to go on.")
        self.seconds, self.replica = seconds, replica


class ScaleUpSignalError(GemmaNeuronError):
    """Replicas came back: begin again with them. Raise it only where everything is committed."""


class ElasticRuntimeError(EnvironmentProblem):
    """A retry budget is spent; `__cause__` is the last fault."""


def is_error_due_to_replica_down(error: BaseException) -> bool:
    """Whether the error, or one it was raised from, says that a replica is gone."""
    return replica_down(error) is not None


def replica_down(error: BaseException) -> ReplicaDownError | None:
    """The fault in the error's chain of causes."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ReplicaDownError):
        seen = seen.__cause__
    return seen


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signals.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"
