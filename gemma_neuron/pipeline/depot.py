"""A run's checkpoints in a mirror. Work that nobody can reach the store for still gets done; that it is not
mirrored is the error at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.elastic.events import EventLog
from gemma_neuron.errors import NetworkError
from gemma_neuron.pipeline.link import Link
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

    def finish(self, seconds: float, *, only_reached: bool = False) -> None:
        """See `Link.finish`. Without a checkpoint a store that was never reached is not asked again either."""
        never = self._newest is None and self._link.mirror is None
        self._link.finish(seconds, only_reached=only_reached or never)
