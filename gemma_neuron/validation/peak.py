"""The most anonymous memory a process held: what must fit, unlike mapped files, whose pages can be dropped.

The kernel keeps no such peak, so a thread samples it. In: nothing. Out: bytes; 0 where /proc has no RssAnon.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")
EVERY_SECONDS = 0.01
"""A decoder layer's weights stand for seconds, a temporary of a few GB for tens of milliseconds."""


def anonymous_bytes() -> int:
    """Resident anonymous bytes of this process now."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


class AnonymousPeak:
    """`with AnonymousPeak() as peak: …` then `peak.bytes`, the process's most while it ran."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())
