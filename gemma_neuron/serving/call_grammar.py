"""Grammars that hold a tool call, in Gemma 4's own notation, to the tool's parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemma_neuron.serving.notation import DEPTH, KEY

NOTHING = '""'
SIMPLE = {
    "string": "string",
    "number": "NUMBER",
    "integer": "INTEGER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema", "$comment"})
"""Keywords that hold a value to nothing."""
HELD = frozenset(
    {"type", "enum", "const", "anyOf", "$ref", "properties", "required", "items"}
    | {"additionalProperties", "$defs", "definitions"}
)
DEFINITIONS = ("$defs", "definitions")


def call_grammar(
    tools: Sequence[Mapping[str, Any]], *, opening: int, closing: int, quote: int
) -> str:
    """A Lark grammar, in llguidance's dialect, of one call of one of `tools` (OpenAI's `function` objects).

    `opening`, `closing`, `quote`: ids of the marks. Of a tool's parameters it holds names, order, which are required,
    constants, types and choices of them; what else a schema says is left to the model.
    """
    maker = _GrammarMaker(f"<[{quote}]>")
    calls = [maker.call(tool) for tool in tools]
    start = f"start: <[{opening}]> ({' | '.join(calls)}) <[{closing}]>"
    return "\n".join([start, *maker.rules, *_any_value(f"<[{quote}]>")]) + "\n"


def unheld(parameters: Mapping[str, Any]) -> str:
    """What of a tool's parameters `call_grammar` would not hold a call to, as text; empty where it holds all."""
    if "properties" not in parameters and "$ref" not in parameters:
        return "an object without properties may hold anything"
    definitions = _definitions(parameters)
    parts = [parameters, *definitions.values()]
    return next((why for part in parts if (why := _unheld(part, definitions, 0))), "")


def _unheld(schema: Any, definitions: Mapping[str, Any], depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > DEPTH:
        return "a part of the schema is no object, or nested too deeply"
    for keyword in schema:
        if keyword not in ANNOTATIONS | HELD:
            return f"the keyword {str(keyword)[:100]!r} is not held to"
    for keyword in ("$ref", "anyOf", "enum", "const"):
        beside = {keyword, *DEFINITIONS} | ({"type"} if keyword in ("enum", "const") else set())
        if keyword in schema and set(schema) - ANNOTATIONS - beside:
            return f"what stands beside {keyword!r} is not held to"
    if "$ref" in schema:
        found = schema["$ref"] in definitions
        return "" if found else f"the $ref {str(schema['$ref'])[:100]!r} is none of its definitions"
    if "const" in schema or "enum" in schema:
        found = _constants(schema) is not None
        return "" if found else "constants other than strings, numbers and the like are not held to"
    for kind in () if "anyOf" in schema else _kinds(schema):
        if kind not in ("object", "array", *SIMPLE):
            return f"the type {str(kind)[:100]!r} is not held to"
        why = _unheld_object(schema) if kind == "object" else ""
        if why:
            return why
    return next(
        (why for part in _parts(schema) if (why := _unheld(part, definitions, depth + 1))), ""
    )


def _unheld_object(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return "an object without properties may hold anything"
    if schema.get("additionalProperties") is not False:
        return "additionalProperties other than false is not held to"
    if not all(KEY.fullmatch(str(key)) for key in properties):
        return "the name of a property cannot be written in a call"
    return ""


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of what a value of this one may be or hold."""
    if "anyOf" in schema:
        choices = schema["anyOf"]
        yield from choices if isinstance(choices, list) and choices else [None]
        return
    kinds = _kinds(schema)
    if "array" in kinds and "items" in schema:
        yield schema["items"]
    if "object" in kinds and isinstance(schema.get("properties"), Mapping):
        yield from schema["properties"].values()


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type", "object" if "properties" in schema else None)
    return kind if isinstance(kind, list) and kind else [kind]


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """What a value must be one of; None where the schema does not say, or says more than constants can."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    good = isinstance(choices, list) and choices and all(map(_scalar, choices))
    return list(choices) if good and isinstance(choices, list) else None


def _definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What may be named by `$ref`, by that name."""
    found: dict[str, Any] = {}
    for where in DEFINITIONS:
        named = parameters.get(where)
        if isinstance(named, Mapping):
            found |= {f"#/{where}/{name}": schema for name, schema in named.items()}
    return found


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
        self._definitions: dict[str, Any] = {}
        self._named: dict[str, str] = {}
        """The rule of each definition that was met; it may name itself."""

    def call(self, tool: Mapping[str, Any]) -> str:
        parameters = tool.get("parameters")
        body = "free_object"
        if isinstance(parameters, Mapping):
            self._definitions, self._named = _definitions(parameters), {}
            body = self.value(parameters, 0)
        if body == "anything":
            body = "free_object"
        return self._rule(f"{_literal('call:' + str(tool['name']))} {body}")

    def value(self, schema: Any, depth: int) -> str:
        """A rule, or an alternative in brackets, for the values of a schema."""
        if not isinstance(schema, Mapping) or depth > DEPTH:
            return "anything"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        constants = _constants(schema)
        if constants is not None:
            return self._rule(" | ".join(map(self._constant, constants)))
        choices = schema.get("anyOf")
        if isinstance(choices, list) and choices:
            return self._either([self.value(choice, depth + 1) for choice in choices])
        return self._either([self._of_kind(str(kind), schema, depth) for kind in _kinds(schema)])

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            item = self.value(schema.get("items"), depth + 1)
            return self._rule(f'"[" "]" | "[" {item} ("," {item})* "]"')
        return SIMPLE.get(kind, "anything")

    def _reference(self, name: str) -> str:
        if name not in self._definitions:
            return "anything"
        if name not in self._named:
            self._named[name] = self._rule("")
            here = self._named[name]
            index = len(self.rules) - 1
            self.rules[index] = f"{here}: {self.value(self._definitions[name], 1)}"
        return self._named[name]

    def _either(self, choices: list[str]) -> str:
        return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not all(
            KEY.fullmatch(str(k)) for k in properties
        ):
            return "free_object"
        if not properties:
            return '"{" "}"' if schema.get("additionalProperties") is False else "free_object"
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
