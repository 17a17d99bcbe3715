"""Imported by a forkserver before all else: ends it when its controller dies while the rest is being imported.

Once it serves it notices by itself. But torch is a second to import, half a minute on a machine short of memory,
and until then a server whose controller was killed would load on for nobody. For a forkserver only: to import
this module starts a thread, which ends before the first fork.
"""

import os
import threading

POLL_SECONDS = 0.2

_controller = os.getppid()
_serving = threading.Event()


def _end_with_controller() -> None:
    while not _serving.wait(POLL_SECONDS):
        if os.getppid() != _controller:
            os._exit(1)


_watch = threading.Thread(target=_end_with_controller, daemon=True)
_watch.start()


def _end_watch() -> None:
    _serving.set()
    _watch.join()


os.register_at_fork(before=_end_watch)
