"""Two ways to get an answer to messages, piece by piece: an engine in this process, or a server's URL."""

from __future__ import annotations

import json
import queue
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.errors import EnvironmentProblem, UsageError
from gemma_neuron.serving.address import api_base, key_headers
from gemma_neuron.serving.answers import Answer
from gemma_neuron.serving.engine import Engine, RunnerFactory
from gemma_neuron.serving.requests import GenerationRequest, Sampling, TokenEvent
from gemma_neuron.serving.service import placeholder_ids, sampling_defaults
from gemma_neuron.serving.source import NotServing
from gemma_neuron.settings import KEY_VARIABLE

if TYPE_CHECKING:
    import httpx2

    from gemma_neuron.port import Port

Message = dict[str, str]
SILENCE_SECONDS = 600.0
"""How long a server may say nothing: it sends each token, but a long prompt comes first."""

HINTS = {
    400: "Change the message or the flag that it names.",
    401: f"Set {KEY_VARIABLE}.",
    404: "Give the server's own address, without a path or with /v1.",
    503: "Ask again.",
}
"""What to do about an answer of that status."""


class Talker(Protocol):
    """Answers conversations. `note` is something the user should know first, or empty."""

    note: str
    max_tokens: int | None
    temperature: float | None
    enable_thinking: bool

    def answer(self, messages: Sequence[Message]) -> Iterator[str]: ...

    def close(self) -> None: ...


class LocalTalker:
    """A port loaded into this process. Raises what the runner's factory raises."""

    def __init__(self, port: Port, factory: RunnerFactory) -> None:
        self.max_tokens: int | None = None
        self.temperature: float | None = None
        self.enable_thinking = False
        folder = port.source_folder
        self._assets = load_chat_assets(folder)
        self._assets.need_template()
        self._defaults = sampling_defaults(folder)
        verdict = port.verdict()
        self.note = ""
        if verdict != "works":
            self.note = (
                f"unvalidated: the port's verdict is {verdict or 'missing'}, answers may be wrong "
                f"(`gemma-neuron validate {port.path}`)"
            )
        self._engine = Engine(factory, banned_ids=placeholder_ids(folder))
        self._engine.start()
        if not self._engine.wait_loaded():
            assert self._engine.failure is not None
            raise self._engine.failure

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        try:
            sequence = self._engine.submit(self._request(messages), events.put)
        except NotServing as error:
            raise EnvironmentProblem(str(error), "Start the chat again.") from error
        answer = Answer(self._assets)
        try:
            while answer.finish is None:
                delta = answer.feed(events.get())
                if delta.text:
                    yield delta.text
        finally:
            self._engine.cancel(sequence)
        if answer.finish == "error":
            raise EnvironmentProblem(answer.error)

    def _request(self, messages: Sequence[Message]) -> GenerationRequest:
        ids = self._assets.prompt_ids(messages, enable_thinking=self.enable_thinking)
        limits = self._engine.limits
        assert limits is not None
        room = limits.max_context - len(ids)
        if room < 1:
            raise UsageError(
                f"The conversation has {len(ids)} tokens; this port's context is {limits.max_context}.",
                "Start afresh with /clear.",
            )
        default = self._defaults
        temperature = default.temperature if self.temperature is None else self.temperature
        return GenerationRequest(
            prompt_ids=tuple(ids),
            max_tokens=min(self.max_tokens or room, room),
            stop_ids=self._assets.stop_ids,
            sampling=Sampling(
                temperature=temperature,
                top_p=default.top_p,
                top_k=default.top_k,
                seed=secrets.randbits(63),
            ),
        )

    def close(self) -> None:
        self._engine.close()
        if self._assets.template is not None:
            self._assets.template.close()


class UrlTalker:
    """An OpenAI-shaped server; the key comes from the environment, never from the command line."""

    def __init__(self, url: str) -> None:
        import httpx2

        self._url = api_base(url)
        self.max_tokens: int | None = None
        self.temperature: float | None = None
        self.enable_thinking = False
        self._client = httpx2.Client(
            headers=key_headers(),
            timeout=httpx2.Timeout(SILENCE_SECONDS, connect=10.0),
        )
        with _told_as_ours(url):
            found = self._client.get(f"{self._url}/models")
            _check(found)
            model = found.json()["data"][0]
        self._model = model["id"]
        self.note = (
            "unvalidated: " + str(model["verdict"]) if model.get("validated") is False else ""
        )

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        body: dict[str, Any] = {"model": self._model, "messages": list(messages), "stream": True}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.enable_thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        with (
            _told_as_ours(self._url),
            self._client.stream("POST", f"{self._url}/chat/completions", json=body) as reply,
        ):
            _check(reply)
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield from _content(json.loads(line[6:]))
        raise EnvironmentProblem(f"{self._url} ended the answer early.", "Ask again.")

    def close(self) -> None:
        self._client.close()


def _content(chunk: Any) -> Iterator[str]:
    if chunk.get("error"):
        error = chunk["error"]
        raise EnvironmentProblem(str(error.get("message") if isinstance(error, dict) else error))
    for choice in chunk.get("choices", []):
        text = (choice.get("delta") or {}).get("content")
        if text:
            yield text


def _check(reply: httpx2.Response) -> None:
    """Raise with the server's own words unless it answered 200."""
    if reply.status_code == 200:
        return
    reply.read()
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = reply.text[:300]
    kind = UsageError if reply.status_code == 400 else EnvironmentProblem
    hint = HINTS.get(reply.status_code, "Look at the server's log.")
    raise kind(f"The server answered {reply.status_code}: {message}", hint)


@contextmanager
def _told_as_ours(url: str) -> Iterator[None]:
    """Turn failures of the connection and of foreign JSON into one of our errors."""
    import httpx2

    try:
        yield
    except httpx2.HTTPError as error:
        raise EnvironmentProblem(
            f"Talking to {url} failed: {type(error).__name__}: {error}.",
            "Is the server running? `gemma-neuron serve-local PORT` starts one.",
        ) from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"{url} does not answer as an OpenAI-shaped server does.",
            "Give the address of one, for example of `gemma-neuron serve-local PORT`.",
        ) from error
