"""The end of work that is uploaded while it is done: what is left is sent, in the time that there is.

An error of the work comes before one of the uploads. A signal or a notice, during the work or during this very wait,
leaves a minute; a second Ctrl-C nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from gemma_neuron.elastic.notice import Notices
from gemma_neuron.errors import GemmaNeuronError, Interrupted
from gemma_neuron.interrupts import AtOnce, Stop

ASKED = (Interrupted, KeyboardInterrupt, Stop)


class Finish(Protocol):
    """Send what is left within `seconds`. With `only_reached` a store that was never reached is left alone; without
    it that is a NotMirroredError."""

    def __call__(self, seconds: float, *, only_reached: bool = False) -> None: ...


@contextmanager
def flushed(
    finish: Finish, grace: float, notices: Notices, tell: Callable[[str], None]
) -> Iterator[None]:
    """Work that `finish` ends: within `grace` seconds, or what a notice or a signal leaves of them.

    Raises what the work raises, else what `finish` does.
    """
    end = _End(finish, grace, notices)
    try:
        yield
    except AtOnce:
        raise
    except BaseException as error:
        try:
            end.come(only_reached=True, hurried=isinstance(error, ASKED))
        except GemmaNeuronError as problem:
            tell(f"warning: {problem.message}")
        raise
    end.come(only_reached=False)


@dataclass(frozen=True, slots=True)
class _End:
    finish: Finish
    grace: float
    notices: Notices

    def come(self, *, only_reached: bool, hurried: bool = False) -> None:
        """Raises what `finish` does, and what this process is asked meanwhile."""
        if self.notices.ending() is not None or hurried:
            self._hurry(only_reached)
            return
        try:
            self.finish(self.grace, only_reached=only_reached)
        except AtOnce:
            raise
        except (KeyboardInterrupt, Stop):
            self.notices.ending()
            self._hurry(only_reached=True)
            raise

    def _hurry(self, only_reached: bool) -> None:
        """Nothing but a second Ctrl-C ends this: it is bounded."""
        with self.notices.noting():
            seconds = min(self.grace, self.notices.upload_seconds())
            self.finish(seconds, only_reached=only_reached)
