"""Control tokens that a conversation's own words spell: as text, or by what a chat template makes of it.

Encoding turns such text into turns and tool marks, so a user could write another role's words. In: messages or tools,
and the assets. Out: the token's text, or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemma_neuron.chat import ChatAssets

STAND_INS = 0xE000
"""The first of Unicode's private characters, which no control token holds."""


def control_text(messages: Sequence[Mapping[str, Any]], assets: ChatAssets) -> str | None:
    """The first control token spelled in one string of the messages, or None. Every string counts, roles and tool
    arguments included; what a template puts together is `rendered_control_text`'s affair."""
    for message in messages:
        for text in texts_of(message):
            for token in assets.tokenizer.encode(text):
                if token in assets.guarded_ids:
                    return assets.tokenizer.piece_of(token)
    return None


def rendered_control_text(
    messages: Sequence[Mapping[str, Any]],
    assets: ChatAssets,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool = False,
    ids: Sequence[int] | None = None,
) -> str | None:
    """The first control token of the rendered prompt that the conversation's own words made, or None.

    Templates trim, cut and join, so that pieces harmless by themselves can come together. Whatever a template does:
    the same conversation is rendered without the marks that control tokens begin and end with, and both prompts must
    have the same control tokens in the same order. `ids`: the prompt, where it was rendered already. Raises
    TemplateError.
    """
    marks = _marks(assets)
    unmarked, other_tools = _replaced(list(messages), marks), _replaced(tools, marks)
    if unmarked == list(messages) and other_tools == tools:
        return None
    if ids is None:
        ids = assets.prompt_ids(messages, tools=tools, enable_thinking=enable_thinking)
    own = assets.prompt_ids(unmarked, tools=other_tools, enable_thinking=enable_thinking)
    found, wanted = (
        [token for token in prompt if token in assets.guarded_ids] for prompt in (ids, own)
    )
    for token, expected in zip_longest(found, wanted):
        if token != expected:
            return assets.tokenizer.piece_of(expected if token is None else token)
    return None


def _marks(assets: ChatAssets) -> dict[int, int]:
    """What `str.translate` replaces: the first and last characters of all control tokens but letters and digits,
    which names and numbers are made of, each by a stand-in of its own."""
    pieces = [assets.tokenizer.piece_of(token) for token in assets.guarded_ids]
    ends = {c for piece in pieces if piece for c in (piece[0], piece[-1])}
    marks = sorted(c for c in ends if not c.isalnum() and not c.isspace())
    return {ord(mark): STAND_INS + i for i, mark in enumerate(marks)}


def _replaced(value: Any, marks: Mapping[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(marks)
    if isinstance(value, Mapping):
        return {_replaced(key, marks): _replaced(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, marks) for item in value]
    return value


def texts_of(value: object) -> Iterator[str]:
    """Every string within, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
