"""POST /v1/completions: a text or token ids in, OpenAI's text completion objects out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.serving.answers import Answer, Reading
from gemma_neuron.serving.api_types import CompletionBody
from gemma_neuron.serving.errors import ApiError
from gemma_neuron.serving.openai_chat import new_id
from gemma_neuron.serving.requests import GenerationRequest, Grammar, TokenLogprob
from gemma_neuron.serving.service import (
    DEFAULT_COMPLETION_TOKENS,
    Service,
    check_text,
    collect,
    failed,
    run_all,
    usage,
)
from gemma_neuron.serving.streams import EventStream

MAX_PROMPTS = 64
MAX_PROMPT_LOGPROBS = 2**19


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body as the engine's requests; `echoes` is the text put before each choice's answer."""

    requests: tuple[GenerationRequest, ...]
    echoes: tuple[str, ...]
    prompt_tokens: int


def prepare(service: Service, body: CompletionBody) -> Prepared:
    """Tokenise and check every prompt. Raises ApiError 400."""
    service.limits()
    prompts = body.prompts()
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ApiError(400, f"Give 1 to {MAX_PROMPTS} prompts, not {len(prompts)}.", param="prompt")
    wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if wanted == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens must be at least 1 unless echo is true.", param="max_tokens"
        )
    scored = body.echo and body.logprobs is not None
    schema = None if body.response_format is None else body.response_format.schema_text
    grammar = None if schema is None else Grammar("json_schema", schema)
    requests: list[GenerationRequest] = []
    echoes: list[str] = []
    total = 0
    for prompt in prompts:
        tokenizer = service.assets.tokenizer
        if isinstance(prompt, str):
            check_text(prompt, tokenizer, service.limits())
        # Ids are taken as they are: who sends ids decides about BOS. A text gets it, exactly once.
        ids = service.assets.completion_ids(prompt) if isinstance(prompt, str) else prompt
        total += len(ids)
        requests += service.requests(
            body,
            ids,
            max_tokens=wanted,
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            grammar=grammar,
            first_tag=len(requests),
        )
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        echoes += [echo] * body.n
    if scored:
        _refuse_many_logprobs(requests, 1 + (body.logprobs or 0))
    return Prepared(tuple(requests), tuple(echoes), total)


def _refuse_many_logprobs(requests: Sequence[GenerationRequest], each: int) -> None:
    """They are held until the last is known: some 120 bytes for each, in a replica and here. Raises ApiError 400."""
    asked = each * sum(len(request.prompt_ids) for request in requests)
    if asked > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"echo with logprobs asks for {asked} log-probabilities of prompts; {MAX_PROMPT_LOGPROBS} are "
            "given at once. Ask for fewer alternatives, or in several requests.",
            param="logprobs",
        )


def _answers(service: Service, body: CompletionBody, prepared: Prepared) -> dict[int, Answer]:
    return {i: Answer(service.assets, body.stops, Reading()) for i in range(len(prepared.requests))}


async def whole(
    service: Service, body: CompletionBody, stream: EventStream, prepared: Prepared
) -> dict[str, Any]:
    """The answers as one `text_completion`."""
    answers = _answers(service, body, prepared)
    await collect(stream, answers)
    choices = []
    for i, answer in answers.items():
        told = [*answer.prompt_logprobs, *answer.logprobs]
        choices.append(
            {
                "index": i,
                "text": prepared.echoes[i] + answer.text,
                "logprobs": None if body.logprobs is None else _logprobs(told, service.assets, 0),
                "finish_reason": answer.finish,
            }
        )
    return {
        **_head(service),
        "choices": choices,
        "usage": usage(prepared.prompt_tokens, answers),
    }


async def chunks(
    service: Service, body: CompletionBody, stream: EventStream, prepared: Prepared
) -> AsyncIterator[dict[str, Any]]:
    """The answers as a stream of `text_completion` objects; an error object ends it early."""
    answers = _answers(service, body, prepared)
    head = _head(service)
    want_usage = body.stream_options is not None and body.stream_options.include_usage
    if want_usage:
        head["usage"] = None
    offsets = [0] * len(answers)
    echoed: set[int] = set()
    async with stream:
        for i, echo in enumerate(prepared.echoes):
            if echo and body.logprobs is None:
                yield {**head, "choices": [_choice(i, echo)]}
        async for i, delta in run_all(stream, answers):
            if delta.finish in ("error", "cancelled"):
                yield failed(answers[i]).body()
                return
            told = [] if delta.logprob is None else [delta.logprob]
            text = delta.text
            if body.logprobs is not None and i not in echoed:  # the echo comes with its scores
                echoed.add(i)
                told, text = [*answers[i].prompt_logprobs, *told], prepared.echoes[i] + text
            if text or told or delta.finish is not None:
                choice = _choice(i, text, delta.finish)
                if told:
                    choice["logprobs"] = _logprobs(told, service.assets, offsets[i])
                    offsets[i] = _end(told, service.assets, offsets[i])
                yield {**head, "choices": [choice]}
    if want_usage:
        yield {**head, "choices": [], "usage": usage(prepared.prompt_tokens, answers)}


def _choice(i: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": i, "text": text, "logprobs": None, "finish_reason": finish}


def _head(service: Service) -> dict[str, Any]:
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.info.model_id,
    }


def _logprobs(found: Iterable[TokenLogprob], assets: ChatAssets, offset: int) -> dict[str, Any]:
    out: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in found:
        text = _piece(entry.token, assets)
        out["tokens"].append(text)
        out["token_logprobs"].append(entry.logprob)
        out["top_logprobs"].append(
            None if entry.logprob is None else {_piece(t, assets): v for t, v in entry.top}
        )
        out["text_offset"].append(offset)
        if entry.token not in assets.tokenizer.control_ids:  # those are not in the text
            offset += len(text)
    return out


def _end(found: Iterable[TokenLogprob], assets: ChatAssets, offset: int) -> int:
    return offset + sum(
        len(_piece(entry.token, assets))
        for entry in found
        if entry.token not in assets.tokenizer.control_ids
    )


def _piece(token: int, assets: ChatAssets) -> str:
    return assets.tokenizer.decode([token], skip_special=False)
