"""Gemma 4's own notation of tool calls, `call:NAME{key:value,…}`, read.

Strings stand between `<|"|>` marks, which are one token; numbers, true, false and null are as in JSON; objects are
`{key:value,…}` without quotes around keys, lists `[value,…]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

QUOTE = '<|"|>'
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
KEY = re.compile(r'[^:{}\[\],<>"\s]{1,256}')
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,400})(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?")
WORDS = {"true": True, "false": False, "null": None}
DEPTH = 32


class NotACall(Exception):
    """The text between the tool-call marks is none."""


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of what stood between the marks. Raises NotACall."""
    text = text.strip()
    if not text.startswith("call:"):
        raise NotACall(text[:200])
    name = NAME.match(text, 5)
    if name is None:
        raise NotACall(text[:200])
    reader = _Reader(text, name.end())
    arguments = reader.object(0)
    if reader.at != len(text):
        raise NotACall(text[:200])
    return name[0], arguments


class _Reader:
    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def object(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}

        def pair() -> None:
            self._blank()
            quoted = self.text.startswith(QUOTE, self.at)  # some calls quote their keys as well
            key = self._string() if quoted else self._match(KEY)
            self._take(":")
            out[key] = self.value(depth + 1)

        self._items("{", "}", pair)
        return out

    def value(self, depth: int) -> Any:
        if depth > DEPTH:
            raise NotACall("nested too deeply")
        self._blank()
        if self.text.startswith(QUOTE, self.at):
            return self._string()
        if self.text.startswith("{", self.at):
            return self.object(depth)
        if self.text.startswith("[", self.at):
            found: list[Any] = []
            self._items("[", "]", lambda: found.append(self.value(depth + 1)))
            return found
        for word, meaning in WORDS.items():
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return meaning
        return json.loads(self._match(NUMBER))

    def _items(self, opening: str, closing: str, item: Callable[[], None]) -> None:
        self._take(opening)
        self._blank()
        if self.text.startswith(closing, self.at):
            self.at += 1
            return
        while True:
            item()
            self._blank()
            if self.text.startswith(closing, self.at):
                self.at += 1
                return
            self._take(",")

    def _string(self) -> str:
        end = self.text.find(QUOTE, self.at + len(QUOTE))
        if end < 0:
            raise NotACall("a string without an end")
        found = self.text[self.at + len(QUOTE) : end]
        self.at = end + len(QUOTE)
        return found

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise NotACall(self.text[self.at : self.at + 40])
        self.at = found.end()
        return found[0]

    def _take(self, piece: str) -> None:
        self._blank()
        if not self.text.startswith(piece, self.at):
            raise NotACall(self.text[self.at : self.at + 40])
        self.at += len(piece)

    def _blank(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \n\t":
            self.at += 1
