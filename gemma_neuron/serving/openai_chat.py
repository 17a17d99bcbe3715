"""POST /v1/chat/completions: messages in, OpenAI's chat objects out, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from gemma_neuron.chat import ChatAssets, control_text, rendered_control_text
from gemma_neuron.control_text import texts_of
from gemma_neuron.errors import TemplateError, TemplateLateError
from gemma_neuron.serving.answers import Answer, Delta, ToolCall
from gemma_neuron.serving.api_types import ChatBody
from gemma_neuron.serving.errors import ApiError
from gemma_neuron.serving.requests import GenerationRequest, TokenLogprob
from gemma_neuron.serving.service import (
    Service,
    check_prompt,
    check_text,
    collect,
    failed,
    run_all,
    usage,
)
from gemma_neuron.serving.streams import EventStream
from gemma_neuron.serving.tools import grammar_of, reading_of, template_tools


def prompt_ids(service: Service, body: ChatBody) -> list[int]:
    """The rendered prompt. Raises ApiError 400 for control text, no template, its refusal; 503 when it is late."""
    messages = [message.for_template() for message in body.messages]
    assets, thinking = service.assets, body.chat_template_kwargs.enable_thinking
    guarded = not service.info.allow_control_text
    try:
        tools = template_tools(body, assets)
        limits = service.limits()
        for text in texts_of([*messages, *(tools or [])]):
            check_text(text, assets.tokenizer, limits)
        if guarded:
            for number, message in enumerate(messages, 1):
                found = control_text([message], assets)
                _refuse_control_text(found, "messages", f"Message {number} of {len(messages)} has")
            _refuse_control_text(control_text(tools or [], assets), "tools", "The tools have")
        prompt = assets.prompt_text(messages, tools=tools, enable_thinking=thinking)
        check_text(prompt, assets.tokenizer, limits)
        ids = assets.completion_ids(prompt)
        check_prompt(ids, limits)  # what is too long is not rendered once more
        if guarded:
            found = rendered_control_text(
                messages, assets, tools=tools, enable_thinking=thinking, ids=ids
            )
            _refuse_control_text(found, "messages", "The messages, put together, have")
    except TemplateLateError as error:
        raise ApiError(503, f"{error.message} {error.hint}", code="busy") from error
    except TemplateError as error:
        text = f"{error.message} {error.hint}".strip()
        raise ApiError(400, text, param="messages") from error
    return ids


def _refuse_control_text(found: str | None, param: str, which: str) -> None:
    if found is not None:
        raise ApiError(
            400,
            f"{which} the control token {found!r} as text; it would act as one. "
            "Remove it, or serve with --allow-control-text.",
            param=param,
        )


def chat_requests(service: Service, body: ChatBody) -> list[GenerationRequest]:
    """The engine's requests for a body, one per choice. Renders the template: call it off the loop."""
    service.limits()
    return service.requests(
        body,
        prompt_ids(service, body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar_of(body, service.assets),
    )


def new_answers(service: Service, body: ChatBody) -> dict[int, Answer]:
    reading = reading_of(body)
    return {i: Answer(service.assets, body.stops, reading) for i in range(body.n)}


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


async def whole(
    service: Service, body: ChatBody, stream: EventStream, prompt_tokens: int
) -> dict[str, Any]:
    """The answers as one `chat.completion`."""
    answers = new_answers(service, body)
    await collect(stream, answers)
    return {
        **_head(service, new_id("chatcmpl"), "chat.completion"),
        "choices": [
            {
                "index": i,
                "message": _message(answer),
                "logprobs": _logprobs(answer.logprobs, service.assets) if body.logprobs else None,
                "finish_reason": answer.finish,
            }
            for i, answer in answers.items()
        ],
        "usage": usage(prompt_tokens, answers),
    }


def _message(answer: Answer) -> dict[str, Any]:
    content = answer.text if answer.text or not answer.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


async def chunks(
    service: Service, body: ChatBody, stream: EventStream, prompt_tokens: int
) -> AsyncIterator[dict[str, Any]]:
    """The answers as `chat.completion.chunk` objects; an error object ends the stream early."""
    answers = new_answers(service, body)
    head = _head(service, new_id("chatcmpl"), "chat.completion.chunk")
    want_usage = body.stream_options is not None and body.stream_options.include_usage
    if want_usage:
        head["usage"] = None
    async with stream:
        for i in answers:
            yield {**head, "choices": [_choice(i, {"role": "assistant", "content": ""})]}
        async for i, delta in run_all(stream, answers):
            if delta.finish in ("error", "cancelled"):
                yield failed(answers[i]).body()
                return
            for choice in _delta_choices(i, delta, answers[i], service.assets):
                yield {**head, "choices": [choice]}
    if want_usage:
        yield {**head, "choices": [], "usage": usage(prompt_tokens, answers)}


def _delta_choices(
    i: int, delta: Delta, answer: Answer, assets: ChatAssets
) -> list[dict[str, Any]]:
    out = []
    part: dict[str, Any] = {}
    if delta.reasoning:
        part["reasoning_content"] = delta.reasoning
    if delta.text:
        part["content"] = delta.text
    if delta.call is not None:  # whole at once: its text is read when its closing mark comes
        part["tool_calls"] = [{"index": len(answer.calls) - 1, **_call(delta.call)}]
    if part or delta.logprob is not None:
        choice = _choice(i, part)
        if delta.logprob is not None:
            choice["logprobs"] = _logprobs([delta.logprob], assets)
        out.append(choice)
    if delta.finish is not None:
        out.append(_choice(i, {}, delta.finish))
    return out


def _choice(i: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": finish}


def _head(service: Service, name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": service.info.model_id}


def _logprobs(found: list[TokenLogprob], assets: ChatAssets) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(entry.token, entry.logprob, assets),
                "top_logprobs": [_token(token, value, assets) for token, value in entry.top],
            }
            for entry in found
        ]
    }


def _token(token: int, logprob: float | None, assets: ChatAssets) -> dict[str, Any]:
    text = assets.tokenizer.decode([token], skip_special=False)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
