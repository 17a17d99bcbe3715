"""Tools of a chat request: what the template is given, what the answer is held to."""

from __future__ import annotations

import json
from typing import Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.serving.answers import CHAT, Reading
from gemma_neuron.serving.api_types import ChatBody
from gemma_neuron.serving.call_grammar import call_grammar
from gemma_neuron.serving.call_schema import MOST_DEFINITIONS, parameters_of, unheld
from gemma_neuron.serving.errors import ApiError
from gemma_neuron.serving.grammar import SCHEMA_BYTES
from gemma_neuron.serving.requests import Grammar


def template_tools(body: ChatBody, assets: ChatAssets) -> list[dict[str, Any]] | None:
    """What the template renders as tools. Raises ApiError 400 where it, or its family, knows none."""
    if not body.offered:
        return None
    refuse_unheld(body)
    if not assets.need_template().knows_tools or marks(assets) is None:
        raise ApiError(
            400,
            "This model's chat template does not know tools: they would be dropped without a word.",
            param="tools",
            code="unsupported_parameter",
        )
    return [tool.model_dump(exclude_none=True, exclude={"strict"}) for tool in body.offered]


def refuse_unheld(body: ChatBody) -> None:
    """Raise ApiError 400 for a tool whose calls cannot be held to its parameters though they must, or can never fit."""
    if not _holds(body):
        return
    for index, tool in enumerate(body.tools):
        function = tool.function
        if tool not in body.offered:
            continue
        parameters, name = parameters_of(function.parameters), f"tools.{index}.function"
        size = len(json.dumps(function.parameters))
        if size > SCHEMA_BYTES or len(parameters.definitions) > MOST_DEFINITIONS:
            text = f"{name}.parameters is larger than {SCHEMA_BYTES} bytes or has over {MOST_DEFINITIONS} definitions."
            raise ApiError(400, text, param=f"{name}.parameters")
        if function.strict and (why := unheld(parameters)):
            text = f"The parameter '{name}.strict' is not implemented by this server here: {why}."
            raise ApiError(400, text, param=f"{name}.strict", code="unsupported_parameter")
        if parameters.endless():
            text = f"No call can fit {name}.parameters: they need themselves, or constants contradict their types."
            raise ApiError(400, text, param=f"{name}.parameters")


def _holds(body: ChatBody) -> bool:
    """Whether calls are held to parameters: where one is asked for, and each that is chosen where a tool is strict."""
    return body.tool_choice != "auto" or any(tool.function.strict for tool in body.offered)


def marks(assets: ChatAssets) -> tuple[int, int, int] | None:
    """Ids around a call and of the string quote, in a family that has them."""
    found = assets.markers
    pieces = () if found is None else (found.call_open, found.call_close, found.quote)
    ids = [assets.tokenizer.id_of(piece) for piece in pieces if piece is not None]
    known = [token for token in ids if token is not None]
    return (known[0], known[1], known[2]) if len(known) == 3 else None


def reading_of(body: ChatBody) -> Reading:
    """What is read out of the answer."""
    if not body.offered:
        return CHAT
    return Reading(thoughts=True, calls=True, one_call=not body.parallel_tool_calls)


def grammar_of(body: ChatBody, assets: ChatAssets) -> Grammar | None:
    """What a chat answer is held to: response_format's schema, a call that tool_choice asks for, or, where a tool is
    strict, each call the model chooses to make."""
    thought = _thought(assets) if body.chat_template_kwargs.enable_thinking else None
    if body.response_format is not None and body.response_format.schema_text is not None:
        return Grammar("json_schema", body.response_format.schema_text, thought)
    found = marks(assets)
    if not body.offered or found is None or not _holds(body):
        return None
    tools = [tool.function.model_dump(exclude_none=True) for tool in body.offered]
    text = call_grammar(tools, opening=found[0], closing=found[1], quote=found[2])
    if body.tool_choice == "auto":
        return Grammar("lark", text, opening=found[0])
    return Grammar("lark", text, thought)


def _thought(assets: ChatAssets) -> tuple[int, int] | None:
    markers = assets.markers
    if markers is None or markers.thought_open is None or markers.thought_close is None:
        return None
    opening = assets.tokenizer.id_of(markers.thought_open)
    closing = assets.tokenizer.id_of(markers.thought_close)
    return None if opening is None or closing is None else (opening, closing)
