"""A download on stderr: what it is, then bytes and rate."""

from __future__ import annotations

import sys
import time

from gemma_neuron.render import PROGRESS_SECONDS, notice, on_terminal, safe, size


class Download:
    """Lines for the user and a moving one of bytes and rate; plain lines where that is no terminal."""

    def __init__(self) -> None:
        self.done, self.live = 0, on_terminal()
        self.started = self.shown = time.monotonic()

    def tell(self, line: str) -> None:
        if self.live:
            sys.stderr.write("\r\x1b[K")
        notice(line)

    def progress(self, count: int) -> None:
        """`count` more bytes arrived."""
        now = time.monotonic()
        if not self.done:
            self.started = self.shown = now
        self.done += count
        if now - self.shown >= (PROGRESS_SECONDS if self.live else 10 * PROGRESS_SECONDS):
            self.shown = now
            text = f"fetched {size(self.done)} at {size(self.done / (now - self.started))}/s"
            if self.live:
                sys.stderr.write(f"\r\x1b[K{safe(text)}")
                sys.stderr.flush()
            else:
                notice(text)
