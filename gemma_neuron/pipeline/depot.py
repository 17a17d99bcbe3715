"""A run's checkpoints in a mirror. Work that nobody can reach the store for still gets done; that it is not
mirrored is the error at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.errors import GemmaNeuronError, Interrupted, NetworkError, NotMirroredError
from gemma_neuron.pipeline.mirroring import NOTICE_SECONDS
from gemma_neuron.tuning.checkpoints import STEM, folder_name, step_of

if TYPE_CHECKING:
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.mirror.sets import SetMirror

Notice = Callable[[str], None]


class CheckpointDepot:
    """`tuning.plan.Depot` on S3: steps are folders of `root`."""

    def __init__(
        self,
        root: Path,
        identity: str,
        options: MirrorOptions,
        *,
        keep: int,
        notice: Notice,
        events: EventLog,
    ) -> None:
        self._root, self._identity, self._options = root, identity, options
        self._keep, self._notice, self._events = keep, notice, events
        self._newest: int | None = None
        self._mirror = self._connected()

    def _connected(self) -> SetMirror | None:
        """None while the store cannot be reached. Raises MirrorInUseError or AccessError."""
        from gemma_neuron.mirror.sets import SetMirror

        try:
            return SetMirror(
                self._root,
                STEM,
                self._identity,
                self._options,
                keep=self._keep,
                tell=self._notice,
                done=lambda name: self._events.emit("mirrored", step=step_of(name)),
            )
        except NetworkError as error:
            self._notice(f"warning: working without the mirror for now: {error.message}")
            return None

    def committed(self) -> list[int]:
        """See `Depot`. Nothing where the store cannot be reached."""
        if self._mirror is None:
            return []
        try:
            found = (step_of(name) for name in self._mirror.names())
            return [step for step in found if step is not None]
        except NetworkError as error:
            self._notice(f"warning: nothing is taken from the mirror: {error.message}")
            return []

    def pull(self, step: int, folder: Path) -> None:
        """See `Depot`."""
        assert self._mirror is not None
        self._notice(f"mirror: taking step {step} from {self._mirror.store.location}")
        self._mirror.pull(folder_name(step), folder)

    def drop(self, step: int) -> None:
        """See `Depot`."""
        assert self._mirror is not None
        self._mirror.drop(folder_name(step))

    def put(self, step: int) -> None:
        """See `Depot`."""
        self._newest = step
        if self._mirror is not None:
            self._mirror.put(folder_name(step))

    def finish(self, grace: float | None = None) -> None:
        """Wait for the newest checkpoint to be there. Raises NotMirroredError or OwnerLostError."""
        if self._mirror is None and self._newest is not None:
            self._notice("mirror: trying the store once more")
            self._mirror = self._connected()
            if self._mirror is None:
                raise NotMirroredError(
                    f"Nothing was mirrored to {self._options.uri}: the store cannot be reached.",
                    "Run the same command again: it uploads what is missing.",
                )
            self._mirror.put(folder_name(self._newest))
        if self._mirror is not None:
            self._mirror.finish(grace)


@contextmanager
def kept_in(depot: CheckpointDepot | None, notice: Notice) -> Iterator[CheckpointDepot | None]:
    """Within it checkpoints are uploaded as they are committed; at its end the newest is there.

    An error of the work itself comes first, and hurries where it is a notice.
    """
    try:
        yield depot
    except BaseException as error:
        if depot is not None:
            hurried = isinstance(error, Interrupted | KeyboardInterrupt)
            try:
                depot.finish(NOTICE_SECONDS if hurried else None)
            except GemmaNeuronError as problem:
                notice(f"warning: {problem.message}")
        raise
    if depot is not None:
        depot.finish()
