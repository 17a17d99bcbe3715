"""The commits of a run: what is acknowledged, what a recovery begins from, what the mirror has beyond this disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.errors import IntegrityError
from gemma_neuron.tuning.checkpoints import Checkpoints, Recovered
from gemma_neuron.tuning.plan import Depot


@dataclass(slots=True)
class Commits:
    """Controller-side; the files are written by rank 0. `acknowledged`: a step that no fault loses any more."""

    checkpoints: Checkpoints
    depot: Depot | None
    events: EventLog
    tell: Callable[[str], None]
    keep: int
    acknowledged: int = 0
    pending: int | None = None
    """A step that is being written."""

    def begin(self, step: int) -> Path:
        """The folder for a step that is to be written now."""
        self.pending = step
        return self.checkpoints.at(step)

    def look(self) -> None:
        """Acknowledge the pending step once its marker is there."""
        if self.pending is None or not self.checkpoints.is_committed(self.pending):
            return
        self.acknowledged, self.pending = self.pending, None
        self.events.emit("committed", step=self.acknowledged)
        self.checkpoints.prune(self.keep)
        if self.depot is not None:
            self.depot.put(self.acknowledged)

    def recover(self) -> Recovered:
        """The newest step that is whole on this disk. Nobody writes now."""
        found = self.checkpoints.recover()
        for step, why in found.refused.items():
            self._refused(step, why)
        if found.partial:
            self.events.emit("partial_removed", folders=list(found.partial))
        self.acknowledged, self.pending = found.step, None
        return found

    def survey(self) -> Recovered:
        """As `recover`, of the mirror too: what is newer there is fetched."""
        found = self.recover()
        if self.depot is None:
            return found
        mirrored = self.depot.committed()
        for step in mirrored:
            if step <= found.step:
                break
            try:
                self.depot.pull(step, self.checkpoints.at(step))
            except IntegrityError as error:
                self._refused(step, error.message)
                self.depot.drop(step)
                continue
            found = self.recover()
            if found.step == step:
                return found
            self.depot.drop(step)
        if found.step and found.step not in mirrored:
            self.depot.put(found.step)
        return found

    def _refused(self, step: int, why: str) -> None:
        self.tell(f"warning: the checkpoint of step {step} is refused: {why}")
        self.events.emit("checkpoint_refused", step=step, why=why)
