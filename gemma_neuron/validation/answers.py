"""Judging one answer: right, ended, clean. The same judge for the reference and for the port.

In: a question, generated ids (its stop id last, when it ended), the tokenizer. Out: `Judgement`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.validation.degenerate import degenerate
from gemma_neuron.validation.questions import Question

_CALL = re.compile(r"call:([\w.\-]+)\s*\{(.*)\}", re.DOTALL)
_ARGUMENT = re.compile(r'(\w+):(?:<\|"\|>(.*?)<\|"\|>|([^,{}]*))', re.DOTALL)
SHOWN_TEXT = 300
"""Characters of an answer that a report keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`right`: an expected answer is in `text`; `ended`: by a stop id; `problems`: loops, leaked control
    tokens, JSON that does not parse. `asked`: the question's turns in OpenAI's form."""

    name: str
    kind: str
    asked: list[dict[str, Any]]
    expected: tuple[str, ...]
    right: bool
    ended: bool
    problems: tuple[str, ...]
    text: str


def judge(
    name: str, question: Question, ids: Sequence[int], stop_ids: Collection[int], assets: ChatAssets
) -> Judgement:
    """Judge a final answer (for a tool question: the one after the tool's result)."""
    ended = bool(ids) and ids[-1] in stop_ids
    body = list(ids[:-1] if ended else ids)
    problems = []
    loop = degenerate(body, assets.tokenizer)
    if loop is not None:
        problems.append(loop)
    visible = after_thought(body, assets) if question.thinking else body
    if question.kind != "completion":
        leaked = sorted({assets.tokenizer.piece_of(t) for t in visible if t in assets.guarded_ids})
        if leaked:
            problems.append(f"control tokens in the text: {' '.join(leaked)}")
    text = assets.tokenizer.decode(visible)
    if question.kind == "json" and not _is_json(text):
        problems.append("is not JSON")
    return Judgement(
        name=name,
        kind=question.kind,
        asked=question.turns,
        expected=question.answers,
        right=any(answer in text for answer in question.answers),
        ended=ended,
        problems=tuple(problems),
        text=text[:SHOWN_TEXT],
    )


def after_thought(ids: Sequence[int], assets: ChatAssets) -> list[int]:
    """The ids behind the last closed thought channel; all of them when there is none."""
    close = assets.markers.thought_close if assets.markers is not None else None
    token = assets.tokenizer.id_of(close) if close is not None else None
    items = list(ids)
    if token is None or token not in items:
        return items
    return items[len(items) - items[::-1].index(token) :]


def tool_call(ids: Sequence[int], assets: ChatAssets) -> tuple[str, dict[str, Any]] | None:
    """(function, arguments) that an answer calls, in Gemma 4's notation `call:NAME{key:value}`."""
    text = assets.tokenizer.decode(list(ids), skip_special=False)
    found = _CALL.search(text)
    if found is None:
        return None
    arguments: dict[str, Any] = {}
    for key, quoted, bare in _ARGUMENT.findall(found.group(2)):
        arguments[key] = quoted if quoted or not bare else _value(bare)
    return found.group(1), arguments


def turns_after_tool(question: Question, call: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the model's call and the tool's result behind it, in OpenAI's form."""
    name, arguments = call
    return [
        *question.turns,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            ],
        },
        {
            "role": "tool",
            "name": name,
            "tool_call_id": "call_0",
            "content": question.tool_result,
        },
    ]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_json(text: str) -> bool:
    body = text.strip()
    if body.startswith("```"):
        body = body.strip("`").removeprefix("json")
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
