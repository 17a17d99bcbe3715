"""All replicas asked at once, and what is made of their answers: the root of a fault, not its echo.

When a replica is lost the others break off their collective and say so. That is no second fault: the one
that ended is looked for first, and only where none did is the broken collective the reason itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gemma_neuron.elastic.engine import Engine, Outcome, WorkerHandle
from gemma_neuron.elastic.faults import CollectiveAborted, ReplicaDownError

POLL_SECONDS = 0.5
ROOT_SECONDS = 2.0
"""Between the first broken collective and the death that broke it: milliseconds, on a loaded machine more."""


class Fleet:
    """Calls on workers of one engine. `idle`: called while answers are waited for."""

    def __init__(self, engine: Engine, idle: Callable[[], None] = lambda: None) -> None:
        self._engine, self._idle = engine, idle

    def ask(
        self,
        handles: Sequence[WorkerHandle],
        function: Callable[..., Any],
        arguments: Callable[[int], tuple[Any, ...]] = lambda position: (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Answers by position. Raises the fault of a replica that was lost, what a call raised, or `meanwhile`."""
        for position, handle in enumerate(handles):
            self._engine.call(handle, function, *arguments(position))
        answers: dict[WorkerHandle, Any] = {}
        aborted: CollectiveAborted | None = None
        until = 0.0
        while len(answers) < len(handles):
            waiting = [handle for handle in handles if handle not in answers]
            for outcome in sorted(self._engine.wait(waiting, POLL_SECONDS), key=_echo):
                broken = _answer(outcome, answers)
                if broken is not None and aborted is None:
                    aborted, until = broken, time.monotonic() + ROOT_SECONDS
            if aborted is not None and time.monotonic() > until:
                break
            self._idle()
            meanwhile()
        if aborted is not None:
            raise aborted
        return [answers[handle] for handle in handles]


def _echo(outcome: Outcome) -> bool:
    return isinstance(outcome.fault, CollectiveAborted)


def _answer(outcome: Outcome, answers: dict[WorkerHandle, Any]) -> CollectiveAborted | None:
    """Note an answer; a broken collective is returned, every other trouble raised."""
    fault: ReplicaDownError | None = outcome.fault
    if outcome.error is not None:
        raise outcome.error
    if fault is not None and not isinstance(fault, CollectiveAborted):
        raise fault
    answers[outcome.handle] = outcome.answer
    return fault
