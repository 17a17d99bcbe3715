"""JSON of strangers: text that may be none, or that says one thing to one reader and another to the next.

In: bytes. Out: parsed JSON. Refused: doubled keys, NaN, too many values, text that is not UTF-8.
"""

from __future__ import annotations

import json
from typing import Any

MOST_JSON_VALUES = 8_000_000
"""Gemma's tokenizer.json, the largest file read so, has about two million."""


class BadJsonError(ValueError):
    """Text that is no JSON, with line and column where the parser knows them."""


def parse_json(data: bytes, most_values: int = MOST_JSON_VALUES) -> Any:
    """Strict JSON: UTF-8, no doubled keys, no NaN, bounded values. Raises BadJsonError and nothing else."""
    # Each value but the first follows one of these; texts that hold them make the bound stricter, not laxer.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > most_values:
        raise BadJsonError(f"holds about {values:,} values; at most {most_values:,} are read")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_doubles, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise BadJsonError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise BadJsonError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise BadJsonError("nested too deeply") from error
    except ValueError as error:  # also numbers of thousands of digits
        raise BadJsonError(str(error)) from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadJsonError(f"key {double[:100]!r} stands twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise BadJsonError(f"{name} is not JSON")
