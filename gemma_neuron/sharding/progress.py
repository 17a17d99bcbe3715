"""Who looks on while a checkpoint is cut or compared."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Who looks on while bytes move."""

    def begin(self, label: str, total: int) -> None:
        """A stage of `total` bytes."""

    def __call__(self, count: int, of: int | str) -> None:
        """`count` more bytes are done, of a rank or of a tensor."""
