"""JSON schemas of tools' parameters: what of them a call can be held to, and whether any call fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gemma_neuron.serving.notation import DEPTH, KEY

KINDS = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema", "$comment"})
"""Keywords that hold a value to nothing."""
DEFINITIONS = ("$defs", "definitions")
MOST_DEFINITIONS = 256
CHOOSING = ("$ref", "anyOf", "enum", "const")
HELD = frozenset(
    {"type", "properties", "required", "items", "additionalProperties", *DEFINITIONS, *CHOOSING}
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """A tool's parameters; `definitions` by the text that names them in a `$ref`."""

    schema: Mapping[str, Any]
    definitions: Mapping[str, Any]

    def object(self) -> Mapping[str, Any] | None:
        """The schema of the object that a call's arguments are; None where it says another thing, or nothing."""
        schema: Any = self.schema
        for _ in range(len(self.definitions) + 1):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self.definition(schema)
        good = isinstance(schema, Mapping) and kinds(schema) == ["object"]
        return schema if good and not any(key in schema for key in CHOOSING) else None

    def definition(self, schema: Mapping[str, Any]) -> Any:
        """What a schema's `$ref` names; None for what is not there."""
        name = schema["$ref"]
        return self.definitions.get(name) if isinstance(name, str) else None

    def endless(self) -> bool:
        """Whether no call can fit: its definitions need themselves, or one another in a row deeper than a call may be,
        or constants contradict their type."""
        ending: frozenset[str] = frozenset()
        for _ in range(DEPTH):
            found = self.definitions.items()
            ending = frozenset(name for name, part in found if _ends(part, self, ending))
        return not _ends(self.schema, self, ending)


def parameters_of(schema: Any) -> Parameters:
    """Of a tool's `parameters`, or of any schema; what is no object holds nothing to anything."""
    schema = schema if isinstance(schema, Mapping) else {}
    found: dict[str, Any] = {}
    for where in DEFINITIONS:
        named = schema.get(where)
        if isinstance(named, Mapping):
            found |= {f"#/{where}/{name}": part for name, part in named.items()}
    return Parameters(schema, found)


def unheld(parameters: Parameters) -> str:
    """What of a tool's parameters no call would be held to, as text; empty where a call is held to all."""
    if parameters.object() is None:
        return "parameters that are no object with properties may hold anything"
    parts = [parameters.schema, *parameters.definitions.values()]
    return next((why for part in parts if (why := _unheld(part, parameters, 0))), "")


def kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a value may have; `[None]` where the schema does not say."""
    kind = schema.get("type", "object" if "properties" in schema else None)
    return kind if isinstance(kind, list) and kind else [kind]


def constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """What a value must be one of, by `enum` or `const` and the types beside them; None where there is no such, or
    where one of them is more than a string, a number and the like."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list) or not choices or not all(map(_scalar, choices)):
        return None
    if "type" not in schema:
        return choices
    return [value for value in choices if any(_is(value, kind) for kind in kinds(schema))]


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An object's; None where there are none, or where a call cannot write the name of one."""
    found = schema.get("properties")
    good = isinstance(found, Mapping) and all(KEY.fullmatch(str(key)) for key in found)
    return found if good else None


def required(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    found = schema.get("anyOf")
    return found if isinstance(found, list) and found else None


def _unheld(schema: Any, parameters: Parameters, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > DEPTH:
        return "a part of the schema is no object, or nested too deeply"
    for keyword in schema:
        if keyword not in ANNOTATIONS | HELD:
            return f"the keyword {str(keyword)[:100]!r} is not held to"
    for keyword in CHOOSING:
        beside = {keyword, *DEFINITIONS} | ({"type"} if keyword in ("enum", "const") else set())
        if keyword in schema:
            if set(schema) - ANNOTATIONS - beside:
                return f"what stands beside {keyword!r} is not held to"
            return _unheld_choice(schema, parameters, depth)
    for kind in kinds(schema):
        if not isinstance(kind, str) or kind not in KINDS:
            return f"the type {str(kind)[:100]!r} is not held to"
    why = _unheld_object(schema) if "object" in kinds(schema) else ""
    parts = _parts(schema)
    return why or next((why for part in parts if (why := _unheld(part, parameters, depth + 1))), "")


def _unheld_choice(schema: Mapping[str, Any], parameters: Parameters, depth: int) -> str:
    if "$ref" in schema:
        known = parameters.definition(schema) is not None
        return "" if known else f"the $ref {str(schema['$ref'])[:100]!r} is none of its definitions"
    if "anyOf" in schema:
        parts = alternatives(schema) or [None]
        return next((why for part in parts if (why := _unheld(part, parameters, depth + 1))), "")
    known = constants(schema) is not None
    return "" if known else "constants other than strings, numbers and the like are not held to"


def _unheld_object(schema: Mapping[str, Any]) -> str:
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return "an object without properties may hold anything"
    if schema.get("additionalProperties") is not False:
        return "additionalProperties other than false is not held to"
    if properties(schema) is None:
        return "the name of a property cannot be written in a call"
    needed = schema.get("required", [])
    if not isinstance(needed, list) or len(needed) != len(required(schema) & set(found)):
        return "a required property is none of its properties"
    return ""


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of what an object or a list holds."""
    if "array" in kinds(schema) and "items" in schema:
        yield schema["items"]
    if "object" in kinds(schema):
        yield from (properties(schema) or {}).values()


def _ends(schema: Any, parameters: Parameters, ending: frozenset[str], depth: int = 0) -> bool:
    """Whether there is a value that fits, going by the definitions that are known to have one."""
    if not isinstance(schema, Mapping) or depth > DEPTH:
        return True  # held to nothing
    if "$ref" in schema:
        return parameters.definition(schema) is None or schema["$ref"] in ending
    if (values := constants(schema)) is not None:
        return bool(values)
    if (choices := alternatives(schema)) is not None:
        return any(_ends(choice, parameters, ending, depth + 1) for choice in choices)
    if kinds(schema) != ["object"]:
        return True  # a list may be empty
    needed = required(schema)
    return all(
        _ends(part, parameters, ending, depth + 1)
        for name, part in (properties(schema) or {}).items()
        if name in needed
    )


def _scalar(value: Any) -> bool:
    return value is None or (
        isinstance(value, str | int | float)
        and not (isinstance(value, float) and not math.isfinite(value))
    )


def _is(value: Any, kind: Any) -> bool:
    """Whether a constant is of a JSON schema's type."""
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    if isinstance(value, str):
        return bool(kind == "string")
    return kind == "number" or bool(kind == "integer" and value == int(value))
