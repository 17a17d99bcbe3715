"""Which names from files or the network are let near a file system, a key or a terminal."""

from __future__ import annotations

from pathlib import Path

from gemma_neuron.errors import UsageError

LONGEST_NAME = 512
LONGEST_FILE_NAME = 255


def is_plain_name(name: str, longest: int = LONGEST_NAME) -> bool:
    """Printable, without blanks at the ends, of bounded length: safe to show and to use as a key."""
    return 0 < len(name) <= longest and name.isprintable() and name == name.strip()


def is_plain_file_name(name: str) -> bool:
    """One part, visible, no separators of any system: what this toolkit keeps lies in folders of its own choice."""
    return (
        is_plain_name(name, LONGEST_FILE_NAME)
        and Path(name).name == name
        and not name.startswith(".")
        and not any(mark in name for mark in "/\\:")
    )


def path_of(text: str) -> Path:
    """A path as people type it, `~` expanded. Raises UsageError: an empty one, of an unset variable, is not the
    current folder."""
    if not text.strip():
        raise UsageError("An empty path names nothing.", "Write . for the current folder.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{text}: there is no such user's home folder.", "Write the path in full."
        ) from error
