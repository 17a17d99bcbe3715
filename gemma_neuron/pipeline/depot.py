"""A run's checkpoints in a mirror. Work that nobody can reach the store for still gets done; that it is not
mirrored is the error at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.errors import GemmaNeuronError, Interrupted, NetworkError
from gemma_neuron.pipeline.link import Link
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
        self._link = Link(self._connected, options.uri, notice)
        self._link.start(self._put_newest)

    def _connected(self) -> SetMirror:
        from gemma_neuron.mirror.sets import SetMirror

        return SetMirror(
            self._root,
            STEM,
            self._identity,
            self._options,
            keep=self._keep,
            tell=self._notice,
            done=lambda name: self._events.emit("mirrored", step=step_of(name)),
        )

    def _put_newest(self, mirror: SetMirror) -> None:
        if self._newest is not None:
            mirror.put(folder_name(self._newest))

    def committed(self) -> list[int]:
        """See `Depot`. Nothing where the store cannot be reached."""
        mirror = self._link.mirror
        if mirror is None:
            return []
        try:
            found = (step_of(name) for name in mirror.names())
            return [step for step in found if step is not None]
        except NetworkError as error:
            self._notice(f"warning: nothing is taken from the mirror: {error.message}")
            return []

    def pull(self, step: int, folder: Path) -> None:
        """See `Depot`."""
        mirror = self._link.mirror
        assert mirror is not None
        self._notice(f"mirror: taking step {step} from {mirror.store.location}")
        mirror.pull(folder_name(step), folder)

    def drop(self, step: int) -> None:
        """See `Depot`."""
        assert self._link.mirror is not None
        self._link.mirror.drop(folder_name(step))

    def put(self, step: int) -> None:
        """See `Depot`."""
        self._newest = step
        if self._link.mirror is not None:
            self._put_newest(self._link.mirror)

    def finish(self, grace: float | None = None) -> None:
        """See `Depot`. `grace`: seconds there are when the work ended before its end; a store that was never reached
        is not asked again then."""
        if grace is not None:
            self._link.finish(grace, only_reached=True)
        elif self._newest is not None or self._link.mirror is not None:
            self._link.finish(self._options.grace)


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
