"""What both kinds of completion share: the served model's facts, limits, sampling defaults, running."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.chat import ChatAssets, Tokenizer
from gemma_neuron.serving.answers import Answer, Delta
from gemma_neuron.serving.api_types import GenerationBody
from gemma_neuron.serving.errors import ApiError
from gemma_neuron.serving.grammar import GrammarError
from gemma_neuron.serving.metrics import Meter
from gemma_neuron.serving.requests import GenerationRequest, Grammar, Limits, Sampling
from gemma_neuron.serving.source import NotServing, TokenSource
from gemma_neuron.serving.streams import EventStream

if TYPE_CHECKING:
    from gemma_neuron.port import Port

PLACEHOLDER = re.compile(r"(image|audio|video|boi|eoi|boa|eoa)_token_(id|index)")
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completion; a chat answer may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the server says about itself. `validated`: the port's verdict is `works`."""

    model_id: str
    validated: bool
    verdict: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    allow_control_text: bool = False
    request_seconds: float = 600.0
    defaults: Sampling = field(default_factory=Sampling)
    """Sampling where a request says nothing."""
    port: Port | None = None
    """What `/status` tells about, where it is one that is served."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the HTTP routes need: engine, text, facts."""

    engine: TokenSource
    assets: ChatAssets
    info: ServerInfo
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "meter", Meter(self.engine))

    def limits(self) -> Limits:
        """Raises ApiError 503 until the runner is loaded."""
        if self.engine.phase != "ready" or self.engine.limits is None:
            raise ApiError(503, f"The server is not ready: {self.engine.phase}.", code="not_ready")
        return self.engine.limits

    def open(self, requests: Sequence[GenerationRequest]) -> EventStream:
        try:
            stream = EventStream(
                self.engine, requests, seconds=self.info.request_seconds, meter=self.meter
            )
        except NotServing as error:
            raise ApiError(503, str(error), code="not_ready") from None
        prompts = {id(request.prompt_ids): len(request.prompt_ids) for request in requests}
        self.meter.accepted(sum(prompts.values()))
        return stream

    def requests(
        self,
        body: GenerationBody,
        ids: Sequence[int],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: bool = False,
        grammar: Grammar | None = None,
        first_tag: int = 0,
    ) -> list[GenerationRequest]:
        """One request per choice. Raises ApiError 400 on a prompt, bias or schema that cannot be."""
        limits = self.limits()
        check_prompt(ids, limits, answer=0 if max_tokens == 0 else 1)
        check_ids(body, limits)
        if grammar is not None:
            try:
                self.engine.check(grammar)
            except GrammarError as error:
                name = "tools" if grammar.kind == "lark" else "response_format"
                raise ApiError(400, str(error), param=name) from None
        room = limits.max_context - len(ids)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        own = frozenset() if body.ignore_eos else self.assets.stop_ids
        prompt = tuple(ids)
        return [
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=room if max_tokens is None else min(max_tokens, room),
                stop_ids=own | frozenset(body.stop_token_ids),
                grammar=grammar,
                tag=first_tag + choice,
                sampling=self.sampling(body, seed, choice),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for choice in range(body.n)
        ]

    def sampling(self, body: GenerationBody, seed: int, choice: int) -> Sampling:
        default = self.info.defaults
        return Sampling(
            temperature=default.temperature if body.temperature is None else body.temperature,
            top_p=default.top_p if body.top_p is None else body.top_p,
            top_k=max(default.top_k if body.top_k is None else body.top_k, 0),
            min_p=default.min_p if body.min_p is None else body.min_p,
            seed=seed % 2**64,
            choice=choice,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=tuple(sorted(body.logit_bias.items())),
        )


def check_prompt(ids: Sequence[int], limits: Limits, answer: int = 1) -> None:
    """Raise ApiError 400 unless a prompt and so many tokens of an answer, 0 or 1, are what the port can hold."""
    if not ids:
        raise ApiError(400, "The prompt has no tokens.", param="prompt")
    wrong = next((i for i in ids if not 0 <= i < limits.vocab), None)
    if wrong is not None:
        raise ApiError(
            400, f"Token id {wrong} is not in the vocabulary of {limits.vocab}.", param="prompt"
        )
    if len(ids) + answer > limits.max_context:
        raise _too_long(f"{len(ids)}", len(ids), limits, answer)


def check_text(text: str, tokenizer: Tokenizer, limits: Limits) -> None:
    """Raise ApiError 400 for a text that is too long by its characters alone, before it is encoded."""
    least = tokenizer.least_tokens(text)
    if least > limits.max_context:
        raise _too_long(f"at least {least}", least, limits, 1)


def _too_long(said: str, tokens: int, limits: Limits, answer: int) -> ApiError:
    return ApiError(
        400,
        f"The prompt has {said} tokens; this port's context is {limits.max_context} tokens and "
        f"an answer needs at least {answer}. Shorten the prompt, or compile with "
        f"--max-context {tokens + answer} or more.",
        param="prompt",
        code="context_length_exceeded",
    )


def check_ids(body: GenerationBody, limits: Limits) -> None:
    """Ids that a body names must be in the vocabulary."""
    named: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", body.logit_bias),
        ("stop_token_ids", body.stop_token_ids),
    )
    for name, ids in named:
        wrong = next((i for i in ids if not 0 <= i < limits.vocab), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"{name} names token id {wrong}; the vocabulary has {limits.vocab}.",
                param=name,
            )


async def run_all(
    stream: EventStream, answers: dict[int, Answer]
) -> AsyncIterator[tuple[int, Delta]]:
    """Feed each event to its answer and pass on what it added, until all have ended."""
    async for event in stream:
        answer = answers[event.tag]
        if answer.finish is not None:
            continue
        delta = answer.feed(event)
        if delta.finish is not None and event.finish is None:
            stream.end(event.tag)
        yield event.tag, delta


async def collect(stream: EventStream, answers: dict[int, Answer]) -> None:
    """Run all answers to their end. Raises ApiError when one failed."""
    async with stream:
        async for _ in run_all(stream, answers):
            pass
    for answer in answers.values():
        if answer.finish in ("error", "cancelled"):
            raise failed(answer)


def failed(answer: Answer) -> ApiError:
    return ApiError(500, answer.error or "The server stopped before the answer was complete.")


async def unless_gone(work: Awaitable[Any], receive: Callable[[], Awaitable[Any]]) -> Any:
    """The work's result; cancelled when the client leaves before it is done."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "The client left before the answer was complete.")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def usage(prompt_tokens: int, answers: dict[int, Answer]) -> dict[str, int]:
    made = sum(answer.tokens for answer in answers.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
    }


def sampling_defaults(folder: Path) -> Sampling:
    """The model's own: generation_config.json's. As in stock, one that does not say `do_sample` is greedy."""
    config = _object(folder / "generation_config.json")
    if config.get("do_sample") is not True:
        return Sampling()
    return Sampling(
        temperature=_number(config, "temperature", 1.0),
        top_p=min(_number(config, "top_p", 1.0), 1.0) or 1.0,
        top_k=int(_number(config, "top_k", 0)),
    )


def placeholder_ids(folder: Path) -> tuple[int, ...]:
    """Ids that stand for images and sound in config.json: a text answer never shows them, so they are
    never chosen (Gemma 4 12B was seen to emit them)."""
    config = _object(folder / "config.json")
    found = {v for k, v in config.items() if PLACEHOLDER.fullmatch(k) and isinstance(v, int)}
    return tuple(sorted(found))


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes()) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return float(value) if good and value is not None else default
