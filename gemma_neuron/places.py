"""Where a result is to be written, tried before anything long runs."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from gemma_neuron.errors import UsageError


def require_place(path: Path, flag: str) -> None:
    """Raises UsageError, naming `flag`, where a file could not be put at `path`, whose folder must be there."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(
            f"{flag} {path} cannot be written: {why[:1].lower()}{why[1:]}.",
            "Name a file in a folder that is there and can be written.",
        ) from error
