"""Whether the files that a long run reads are still those it began with.

In: paths. Out: `FilesBefore`, taken before the first of them is read; it says what changed since. What such a run found
holds neither for what lay there nor for what does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.artifacts import digest_file
from gemma_neuron.regular_files import VANISHED, FileState, how_changed

RECORD = ".json"
"""Of these the digest decides: another command may write a record anew, with what it says already."""


@dataclass(frozen=True, slots=True)
class FilesBefore:
    """Path → state and, of a record, blake3; None where there was no file."""

    files: dict[Path, tuple[FileState, str] | None]

    @staticmethod
    def of(paths: Iterable[Path]) -> FilesBefore:
        return FilesBefore({path: _look(path) for path in paths})

    def changed(self) -> str | None:
        """The first file that was written, replaced, added or removed since, and how; None when all are the same."""
        for path, before in self.files.items():
            how = _difference(path, before)
            if how is not None:
                return f"{path} changed while this ran: {how}."
        return None


def _look(path: Path) -> tuple[FileState, str] | None:
    try:
        state = FileState.of(path)
        return state, digest_file(path) if path.suffix == RECORD else ""
    except OSError:
        return None


def _difference(path: Path, before: tuple[FileState, str] | None) -> str | None:
    try:
        state = FileState.of(path)
        if before is None:
            return "it was not there before"
        how = how_changed(before[0], state)
        if how is not None and before[1] and digest_file(path) == before[1]:
            return None
    except OSError:
        return None if before is None else VANISHED
    return how
