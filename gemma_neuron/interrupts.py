"""What a signal asked of this process, kept where no error can hide it.

C code that was running may put an error of its own in place of the handler's, as torch does with a ValueError about a
storage's shape: whoever catches an error asks `asked` first.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from gemma_neuron.errors import Cancelled, Interrupted

CTRL_C = Cancelled("Stopped by Ctrl-C.", "Run the same command to go on.")
SIGTERM = Interrupted("Stopped by SIGTERM with work left.", "Run the same command to go on.")
_asked: list[Interrupted] = []


class Stop(BaseException):
    """Raised where the main thread stands when it is asked to end. No `Exception`: libraries make errors of their own
    of those, botocore one of its connection, and the end would be taken for trouble with a store and tried again."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(error.message)
        self.error = error


class AtOnce(KeyboardInterrupt):
    """A second Ctrl-C: nothing is waited for any more."""


def hear_signals() -> None:
    """SIGTERM and Ctrl-C end the command from here on; a Ctrl-C that whoever started us ignores stays ignored."""
    _asked.clear()
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_ctrl_c)


def asked() -> Interrupted | None:
    """The first that was asked and not answered."""
    return _asked[0] if _asked else None


def answered() -> None:
    """A Ctrl-C was done as asked, and the command goes on. SIGTERM stands: it asks for the end of the process."""
    _asked[:] = [error for error in _asked if error is not CTRL_C]


def _on_ctrl_c(number: int, frame: object) -> NoReturn:
    _asked.append(CTRL_C)
    raise KeyboardInterrupt


def _on_sigterm(number: int, frame: object) -> NoReturn:
    """With work left: what is committed stays, the rest is dropped, exit 75."""
    _asked.append(SIGTERM)
    raise Stop(SIGTERM)
