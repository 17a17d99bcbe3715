"""Token ids to text as they come, and stop strings across token borders.

Both are exact: what was given out, joined, is what decoding and cutting the whole would give,
however the tokens arrived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemma_neuron.tokenizer import Tokenizer

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Incremental detokenizer: feed ids, get text, never half a UTF-8 character.

    A run of byte tokens is held back until a token of another kind ends it: the decoder judges such a
    run as a whole (one bad byte turns all of its bytes into replacement characters), so text given
    out earlier could turn out wrong.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._shown: list[int] = []
        """The last stretch already given out: the left context the decoder needs."""
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete, often empty."""
        out = []
        for token in ids:
            if self._skip and token in self._tokenizer.control_ids:
                continue
            self._held.append(token)
            if BYTE_PIECE.fullmatch(self._tokenizer.piece_of(token)) is None:
                out.append(self._release(final=False))
        return "".join(out)

    def finish(self) -> str:
        """What is still held back."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        if not self._held:
            return ""
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._held)
        if text.endswith(REPLACEMENT) and not final:
            return ""  # byte-level vocabularies: the rest of a character may follow
        self._shown, self._held = self._held, []
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


class StopStrings:
    """Cuts text before the first stop string; holds back what may become one.

    First is the one completed first; of two completed by the same character, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None
        """The stop string met, once one was."""

    def feed(self, text: str) -> str:
        """The text now known to lie before any stop; empty for good once one was found."""
        if self.found is not None:
            return ""
        self._held += text
        hit = self._first_hit()
        if hit is not None:
            start, self.found = hit
            out, self._held = self._held[:start], ""
            return out
        keep = self._possible_start()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """What was held back and did not become a stop."""
        out, self._held = self._held, ""
        return out

    def _first_hit(self) -> tuple[int, str] | None:
        hits = []
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
