"""Text for a terminal without what could drive it: escape sequences and control characters taken out.

A model's words are untrusted: sequences rewrite the screen, the title, the clipboard.
"""

from __future__ import annotations

from typing import Literal

STRING_STARTS = frozenset("]PX^_")  # OSC, DCS, SOS, PM, APC after ESC
STRING_CONTROLS = frozenset("\x90\x98\x9d\x9e\x9f")  # the same as one C1 character
# Marks that reorder text on the screen: what is read is not what is there.
REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
State = Literal["text", "escape", "csi", "string", "string-escape"]


class Cleaner:
    """`clean` for text that comes in pieces; cutting a sequence in two changes nothing."""

    def __init__(self) -> None:
        self._state: State = "text"

    def feed(self, text: str) -> str:
        return "".join(c for c in text if self._take(c))

    def _take(self, c: str) -> bool:
        """Move on by one character; whether it is shown."""
        if self._state == "escape":
            return self._in_escape(c)
        if self._state == "csi":
            if " " <= c <= "?":
                return False
            self._state = "text"
            return False if "@" <= c <= "~" else self._take(c)
        if self._state in ("string", "string-escape"):
            return self._in_string(c)
        if c in ("\x1b", "\x9b") or c in STRING_CONTROLS:
            self._state = {"\x1b": "escape", "\x9b": "csi"}.get(c, "string")  # type: ignore[assignment]
            return False
        return c in "\t\n" or not (c < " " or "\x7f" <= c <= "\x9f" or c in REORDERING)

    def _in_escape(self, c: str) -> bool:
        if " " <= c <= "/":
            return False
        self._state = "text"
        if c == "[":
            self._state = "csi"
        elif c in STRING_STARTS:
            self._state = "string"
        elif not "0" <= c <= "~":
            return self._take(c)
        return False

    def _in_string(self, c: str) -> bool:
        """Up to BEL, ST or the line's end: an unfinished one must not swallow the rest of an answer."""
        if self._state == "string-escape" and c == "\\":
            self._state = "text"
            return False
        self._state = "string-escape" if c == "\x1b" else "string"
        if c in "\x07\x9c\n":
            self._state = "text"
        return c == "\n"


def clean(text: str) -> str:
    """Text without escape sequences and control characters; tabs and newlines stay."""
    return Cleaner().feed(text)
