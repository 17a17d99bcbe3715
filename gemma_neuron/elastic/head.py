"""The head of a cluster (Ray's GCS), bounded for its controller: Ray itself waits for a lost one for ever."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

from gemma_neuron.errors import BackendUnavailableError, EnvironmentProblem

OUTLIVE_HEAD = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After so long without its head, a process of Ray's ends itself: this one shall end by its own errors."""
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


def join(address: str) -> tuple[Any, Head]:
    """Make this process part of the cluster at `address` ("auto": this machine's): the module `ray`, and the head.

    Raises BackendUnavailableError without Ray, EnvironmentProblem without a cluster.
    """
    os.environ.setdefault(OUTLIVE_HEAD, "86400")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise BackendUnavailableError(
            "Workers on several machines need Ray, which is not installed.",
            "pip install 'gemma-neuron[cluster]', on each of them.",
        ) from error
    try:
        _require_answer(address)
        with _own_sigterm():
            context = ray.init(
                address=address,
                namespace="gemma-neuron",
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"The Ray cluster at {address!r} cannot be joined: {error}",
            "Start one (`ray start --head`), or name its address.",
        ) from error
    host, _, port = str(context.address_info["gcs_address"]).rpartition(":")
    return ray, Head(host, int(port))


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """SIGTERM is handled after it as before it: Ray's own handler would end the process with exit code 1."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _require_answer(address: str) -> None:
    """Raise OSError for a host and port where nobody is."""
    host, colon, port = address.rpartition(":")
    if colon and host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=HEAD_SECONDS).close()
