"""Gemma 4's own notation of tool calls, `call:NAME{key:value,…}`, read and held to a tool's parameters.

Strings stand between `<|"|>` marks, which are one token; numbers, true, false and null are as in JSON; objects are
`{key:value,…}` without quotes around keys, lists `[value,…]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

QUOTE = '<|"|>'
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
KEY = re.compile(r'[^:{}\[\],<>"\s]{1,256}')
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,400})(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?")
WORDS = {"true": True, "false": False, "null": None}
DEPTH = 32
NOTHING = '""'
SIMPLE = {
    "string": "string",
    "number": "NUMBER",
    "integer": "INTEGER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}


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


def call_grammar(
    tools: Sequence[Mapping[str, Any]], *, opening: int, closing: int, quote: int
) -> str:
    """A Lark grammar, in llguidance's dialect, of one call of one of `tools` (OpenAI's `function` objects).

    `opening`, `closing`, `quote`: ids of the marks. Of a tool's parameters it holds names, order, which are required,
    enums, and types; what else a schema says is left to the model.
    """
    maker = _GrammarMaker(f"<[{quote}]>")
    calls = [maker.call(tool) for tool in tools]
    start = f"start: <[{opening}]> ({' | '.join(calls)}) <[{closing}]>"
    return "\n".join([start, *maker.rules, *_any_value(f"<[{quote}]>")]) + "\n"


ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema", "$comment"})
"""Keywords that hold a value to nothing."""
HELD = frozenset({"type", "enum", "properties", "required", "items", "additionalProperties"})


def unheld(schema: Any, depth: int = 0) -> str:
    """What of a tool's parameters `call_grammar` would not hold a call to, as text; empty where it holds all."""
    if not isinstance(schema, Mapping) or depth > DEPTH:
        return "a part of the schema is no object, or nested too deeply"
    for keyword in schema:
        if keyword not in ANNOTATIONS | HELD:
            return f"the keyword {str(keyword)[:100]!r} is not held to"
    choices, kind, properties = (schema.get(k) for k in ("enum", "type", "properties"))
    if choices is not None:
        good = isinstance(choices, list) and choices and all(map(_scalar, choices))
        return "" if good else "an enum of other than strings, numbers and the like is not held to"
    if kind not in ("object", "array", *SIMPLE):
        return f"the type {str(kind)[:100]!r} is not held to"
    inner = [schema["items"]] if kind == "array" and "items" in schema else []
    if kind == "object":
        if not isinstance(properties, Mapping) or not properties:
            return "an object without properties may hold anything"
        if schema.get("additionalProperties") is not False:
            return "additionalProperties other than false is not held to"
        if not all(KEY.fullmatch(str(key)) for key in properties):
            return "the name of a property cannot be written in a call"
        inner = list(properties.values())
    return next((why for part in inner if (why := unheld(part, depth + 1))), "")


def _any_value(quote: str) -> list[str]:
    """Rules for values that no schema holds to anything."""
    return [
        'anything: string | NUMBER | "true" | "false" | "null" | free_object | free_list',
        'free_object: "{" "}" | "{" free_pair ("," free_pair)* "}"',
        'free_pair: KEY ":" anything',
        'free_list: "[" "]" | "[" anything ("," anything)* "]"',
        f"string: {quote} TEXT {quote} | {quote} {quote}",
        "TEXT: /[^\\x00-\\x08]+/",
        r"KEY: /[A-Za-z_][A-Za-z0-9_\-]{0,63}/",
        r"NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/",
        r"INTEGER: /-?(0|[1-9][0-9]{0,15})/",
    ]


class _GrammarMaker:
    """Rules for tools' parameters; a rule per object."""

    def __init__(self, quote: str) -> None:
        self.rules: list[str] = []
        self._quote = quote

    def call(self, tool: Mapping[str, Any]) -> str:
        parameters = tool.get("parameters")
        body = self.value(parameters, 0) if isinstance(parameters, Mapping) else "free_object"
        if body == "anything":
            body = "free_object"
        return self._rule(f"{_literal('call:' + str(tool['name']))} {body}")

    def value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > DEPTH:
            return "anything"
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(map(_scalar, choices)):
            return self._rule(" | ".join(self._constant(choice) for choice in choices))
        kind = schema.get("type")
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind == "array":
            item = self.value(schema.get("items"), depth + 1)
            return self._rule(f'"[" "]" | "[" {item} ("," {item})* "]"')
        return SIMPLE.get(str(kind), "anything")

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "free_object"
        if not all(KEY.fullmatch(str(key)) for key in properties):
            return "free_object"
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        pairs = [
            (self._rule(f"{_literal(f'{key}:')} {self.value(sub, depth + 1)}"), key in needed)
            for key, sub in properties.items()
        ]
        return self._rule(f'"{{" {self._in_order(pairs)} "}}"')

    def _in_order(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in their order, commas between those that are there."""
        after = ""
        """What may follow a pair, each with its comma in front."""
        first = NOTHING
        for pair, needed in reversed(pairs):
            here = f"{pair} {after}".strip()
            first = here if needed else f"({here} | {first})"
            after = self._rule(f'"," {here}' if needed else f'"," {here} | {after or NOTHING}')
        return first

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}" if value else self._quote * 2
        return _literal(json.dumps(value))

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
