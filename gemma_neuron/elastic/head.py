"""The head of a cluster (Ray's GCS), bounded for its controller: Ray itself waits for a lost one for ever."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

HEAD_SECONDS, LOOK_SECONDS = 10.0, 1.0
"""For how long the head may refuse connections, and how often it is looked at."""
POLL_SECONDS = 0.25
Answer = TypeVar("Answer")


class Head:
    """The head at `host` and `port`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._looked, self._missed = time.monotonic(), 0.0

    def __str__(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def is_gone(self) -> bool:
        """Whether it has refused connections for HEAD_SECONDS."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            try:
                socket.create_connection(self._address, timeout=LOOK_SECONDS).close()
                self._missed = 0.0
            except OSError:
                self._missed = self._missed or now
        return self._missed > 0 and now - self._missed > HEAD_SECONDS

    def asked(self, ask: Callable[[], Answer], seconds: float = HEAD_SECONDS) -> Answer:
        """The answer of a call that waits for the head. Raises TimeoutError, and what the call raises."""
        answers: list[Answer] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:
                failed.append(error)

        thread = Thread(target=run, name="ray-head", daemon=True)
        thread.start()
        end = time.monotonic() + seconds
        while thread.is_alive() and time.monotonic() < end and not self.is_gone():
            thread.join(POLL_SECONDS)
        if failed:
            raise failed[0]
        if not answers:
            raise TimeoutError(f"the cluster's head did not answer in {seconds:g} s")
        return answers[0]


def require_answer(address: str) -> None:
    """Raise OSError for a host and port where nobody is."""
    host, colon, port = address.rpartition(":")
    if colon and host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=HEAD_SECONDS).close()
