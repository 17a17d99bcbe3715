"""What a run is asked for beside its recipe: how many replicas, how often to commit, when to give up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gemma_neuron.elastic.engine import DEADLINE_SECONDS
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.notice import Notices

ElasticMode = Literal["pause", "resize"]
COLLECTIVE_SHARE = 60.0
"""A collective may take so many times the silence that counts as hung: it waits for the longest sample of a peer that
is alive, and one that is stopped has been ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a run is kept going. None of it changes the adapter. Seconds throughout."""

    replicas: int = 1
    minimum: int | None = None
    """Replicas to go on with; None waits for all of them."""
    save_every: int = 20
    keep: int = 3
    regrow_seconds: float = 10.0
    """How long the place of a lost replica stays empty where the run goes on without it."""
    hang_seconds: float = DEADLINE_SECONDS
    max_failures: int = 10
    """Failures in a row, with no commit between them."""
    wait_seconds: float = 300.0
    device: str = "cpu"
    threads: int = 1

    @property
    def empty_seconds(self) -> float:
        """How long the place of a lost replica stays empty: not at all where it is waited for."""
        return 0.0 if self.minimum is None else self.regrow_seconds

    @property
    def collective_seconds(self) -> float:
        return COLLECTIVE_SHARE * self.hang_seconds


class Depot(Protocol):
    """Where checkpoints go beside this machine's disk."""

    def committed(self) -> list[int]:
        """Steps that are whole there, newest first; listed anew."""

    def pull(self, step: int, folder: Path) -> None:
        """Fetch one and commit it as `folder`. Raises IntegrityError when its digests do not hold."""

    def drop(self, step: int) -> None:
        """Remove one that is not what it says, so that nobody takes it again."""

    def put(self, step: int) -> None:
        """Send a committed checkpoint in the background; one that is overtaken by a newer one may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` answers (JSON contract). Times, restarts and lost steps are this process's."""

    out: Path
    steps: int
    samples_per_second: float
    final_loss: float
    restarts: int
    lost_steps: int
    downtime_seconds: float
    replicas: int
    parameters: int
    peak_bytes: int
    digest: str
    """blake3 of adapter_model.safetensors."""

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "steps": self.steps,
            "samples_per_second": round(self.samples_per_second, 3),
            "final_loss": self.final_loss,
            "restarts": self.restarts,
            "lost_steps": self.lost_steps,
            "downtime_seconds": round(self.downtime_seconds, 4),
            "replicas": self.replicas,
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "digest": self.digest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands, for people."""

    step: int
    steps: int
    loss: float
    samples_per_second: float
    replicas: int
    committed: int

    def __str__(self) -> str:
        return (
            f"step {self.step} of {self.steps}, loss {self.loss:.4f}, {self.samples_per_second:.1f} samples/s, "
            f"{self.replicas} replica{'s' * (self.replicas != 1)}, last commit {self.committed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run is watched by. `tell`: lines for people; `progress`: called after each step."""

    notices: Notices
    events: EventLog
    tell: Callable[[str], None]
    progress: Callable[[Progress], None] = lambda _: None
    depot: Depot | None = None
