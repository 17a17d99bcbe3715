"""Imported by a forkserver before all else: ends it at once when its controller ends, and by no signal that tells that
one to end: it decides, and may need its workers to the last.

While it serves it notices by itself, and then takes Python apart: with torch loaded some tenths of a second, seconds on
a busy machine, in which it is an orphan that holds the records of the workers that died with it. While it still imports
it notices nothing: torch is a second, half a minute on a machine short of memory, and a server whose controller was
killed would load on for nobody. For a forkserver only: to import this module starts a thread, which ends before the
first fork.
"""

import atexit
import os
import signal
import threading

POLL_SECONDS = 0.2

_server, _controller = os.getpid(), os.getppid()
_serving = threading.Event()


def _end_with_controller() -> None:
    while not _serving.wait(POLL_SECONDS):
        if os.getppid() != _controller:
            os._exit(1)


for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
_watch = threading.Thread(target=_end_with_controller, daemon=True)
_watch.start()


def _begin_to_serve() -> None:
    """Before a fork; the first is after all that is loaded, so that what is registered here comes first at the end."""
    if not _serving.is_set():
        _serving.set()
        _watch.join()
        atexit.register(_leave)


def _leave() -> None:
    if os.getpid() == _server:  # a worker has ends of its own to see to
        os._exit(0)


os.register_at_fork(before=_begin_to_serve)
