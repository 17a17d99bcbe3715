"""What makes tokens for the API: an engine in this process, or replicas in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from gemma_neuron.serving.requests import (
    GenerationRequest,
    Grammar,
    Limits,
    ReplicaState,
    TokenEvent,
)

Phase = Literal["starting", "loading", "ready", "recovering", "draining", "failed", "stopped"]
Deliver = Callable[[TokenEvent], None]
MAX_WAITING = 1024


class NotServing(Exception):
    """No request is taken now; the text says why, for people."""


class TokenSource(Protocol):
    """Runs requests; `deliver` is called from a thread of its own, once for each event, in order."""

    limits: Limits | None
    """None until a runner has been loaded."""
    failure: BaseException | None

    @property
    def phase(self) -> Phase:
        """Requests are taken while it is `ready`."""

    def start(self) -> None:
        """Begin to load; `phase` tells how far it is."""

    def submit(self, request: GenerationRequest, deliver: Deliver) -> Any:
        """Queue a request; what `cancel` takes. Raises NotServing, or GrammarError for a grammar that cannot be."""

    def check(self, grammar: Grammar) -> None:
        """Raise GrammarError when no answer could be held to it. Works: call it off the event loop."""

    def cancel(self, handle: Any) -> None:
        """Stop a request; it ends with the finish reason `cancelled` unless it ended before."""

    def waiting(self) -> int:
        """Requests that no replica has been given yet."""

    def states(self) -> list[ReplicaState]:
        """Every replica, by index."""

    def drain(self, seconds: float) -> bool:
        """Take nothing new and wait for what runs; whether all of it ended in time."""

    def close(self, seconds: float | None = None) -> None:
        """End everything; what still runs is cancelled."""
