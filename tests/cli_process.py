"""The command line's own `main`, in this process: arguments as typed, exit code and both streams back."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import pytest

from gemma_neuron.cli import main


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def run_main(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """As a process of its own would end, without the second it takes to start one."""
    before = sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    sys.argv = ["gemma-neuron", *map(str, arguments)]
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shown = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, shown.out, shown.err)
