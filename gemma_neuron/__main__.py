"""`python -m gemma_neuron`, and the command `gemma-neuron`: until the program is loaded, Ctrl-C just ends it."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Load the command line and run it. Half-loaded modules could only answer Ctrl-C with a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gemma_neuron import cli

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
