"""Names of folders that compilers' command lines can hold.

torch and NxD write such a line as one text, which is taken apart at blanks and quotes again, so that a work folder
named `my port` or `it's` becomes two arguments. Such a folder is named by a link that lies in a plain place.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLAIN = re.compile(r"[A-Za-z0-9_./+:=@%,~-]+")
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Where the link may lie when the user's own folder for temporary files is no plain name either."""


def is_plain(path: str | Path) -> bool:
    return PLAIN.fullmatch(str(path)) is not None


@contextmanager
def plainly_named(folder: Path) -> Iterator[str]:
    """A plain name of `folder`: its own, or a link's. Where no link can be made, its own all the same."""
    own = os.path.abspath(folder)  # noqa: PTH100 - links are kept: where they point may be no plain name
    places = [place for place in (tempfile.gettempdir(), *PLACES) if _is_fit(place)]
    if is_plain(own) or not places:
        yield own
        return
    with tempfile.TemporaryDirectory(dir=places[0], prefix="gemma-neuron-") as place:
        link = Path(place) / "work"
        link.symlink_to(own)
        yield str(link)


def _is_fit(place: str) -> bool:
    return is_plain(place) and os.access(place, os.W_OK)
