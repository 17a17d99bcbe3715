"""Grammars that hold a tool call, in Gemma 4's own notation, to the tool's parameters."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gemma_neuron.serving.call_schema import (
    Parameters,
    alternatives,
    constants,
    kinds,
    parameters_of,
    properties,
    required,
)
from gemma_neuron.serving.notation import DEPTH

SIMPLE = {
    "string": "string",
    "number": "NUMBER",
    "integer": "INTEGER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
EMPTY_OBJECT = '"{" "}"'


def call_grammar(
    tools: Sequence[Mapping[str, Any]], *, opening: int, closing: int, quote: int
) -> str:
    """A Lark grammar, in llguidance's dialect, of one call of one of `tools` (OpenAI's `function` objects).

    `opening`, `closing`, `quote`: ids of the marks. Of a tool's parameters it holds names, order, which are required,
    constants, types and choices of them; what else a schema says is left to the model (`call_schema.unheld`).
    """
    maker = _GrammarMaker(f"<[{quote}]>")
    calls = [maker.call(tool) for tool in tools]
    start = f"start: <[{opening}]> ({' | '.join(calls)}) <[{closing}]>"
    return "\n".join([start, *maker.rules, *_any_value(f"<[{quote}]>")]) + "\n"


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
    """Rules for tools' parameters; a rule per object, and per definition that is named."""

    def __init__(self, quote: str) -> None:
        self.rules: list[str] = []
        self._quote = quote
        self._named: dict[str, str] = {}
        """The rule of each definition of this tool that was met."""
        self._unwritten: deque[tuple[str, Any]] = deque()
        """Such rules and what they are to say: a definition may name itself, or others in a long row."""

    def call(self, tool: Mapping[str, Any]) -> str:
        parameters = parameters_of(tool.get("parameters"))
        self._named = {}
        held = parameters.object()
        body = "free_object" if held is None else self._object(held, parameters, 0)
        while self._unwritten:
            rule, schema = self._unwritten.popleft()
            self.rules.append(f"{rule}: {self._value(schema, parameters, 0)}")
        return self._rule(f"{_literal('call:' + str(tool['name']))} {body}")

    def _value(self, schema: Any, parameters: Parameters, depth: int) -> str:
        """What stands for the values of a schema in a rule."""
        if not isinstance(schema, Mapping) or depth > DEPTH:
            return "anything"
        if "$ref" in schema:
            return self._reference(schema, parameters)
        if values := constants(schema):
            return self._rule(" | ".join(map(self._constant, values)))
        if (choices := alternatives(schema)) is not None:
            return _either([self._value(choice, parameters, depth + 1) for choice in choices])
        return _either([self._of_kind(kind, schema, parameters, depth) for kind in kinds(schema)])

    def _of_kind(
        self, kind: Any, schema: Mapping[str, Any], parameters: Parameters, depth: int
    ) -> str:
        if kind == "object":
            return self._object(schema, parameters, depth)
        if kind == "array":
            item = self._value(schema.get("items"), parameters, depth + 1)
            return self._rule(f'"[" "]" | "[" {item} ("," {item})* "]"')
        return SIMPLE.get(str(kind), "anything")

    def _reference(self, schema: Mapping[str, Any], parameters: Parameters) -> str:
        named = parameters.definition(schema)
        if named is None:
            return "anything"
        name = str(schema["$ref"])
        if name not in self._named:
            self._named[name] = f"d{len(self.rules)}_{len(self._named)}"
            self._unwritten.append((self._named[name], named))
        return self._named[name]

    def _object(self, schema: Mapping[str, Any], parameters: Parameters, depth: int) -> str:
        found = properties(schema)
        if not found:
            closed = found is not None and schema.get("additionalProperties") is False
            return EMPTY_OBJECT if closed else "free_object"
        needed = required(schema)
        pairs = [
            (
                self._rule(f"{_literal(f'{key}:')} {self._value(part, parameters, depth + 1)}"),
                key in needed,
            )
            for key, part in found.items()
        ]
        some = f'"{{" {self._in_order(pairs)} "}}"'
        return self._rule(some if needed & set(found) else f"{EMPTY_OBJECT} | {some}")

    def _in_order(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """One or more of the pairs in their order, with commas: by halves, since a grammar may not be deep."""
        if len(pairs) == 1:
            return pairs[0][0]
        first, second = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        some, others = self._in_order(first), self._in_order(second)
        choices = [f'{some} "," {others}']
        choices += [] if any(needed for _, needed in second) else [some]
        choices += [] if any(needed for _, needed in first) else [others]
        return self._rule(" | ".join(choices))

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}" if value else self._quote * 2
        return _literal(json.dumps(value))

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
