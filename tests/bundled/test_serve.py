"""The official openai client against `serve-local` on the compiled port."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.bundled.conftest import Done

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Greece?",
    "What is the capital of Finland?",
]


@pytest.fixture(scope="module")
def client(validated: tuple[Path, Done]) -> Iterator[openai.OpenAI]:
    """A server process; ended by SIGTERM, which must exit 0."""
    command = [
        sys.executable,
        "-m",
        "gemma_neuron",
        "serve-local",
        str(validated[0]),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        assert ready["pid"] == server.pid
        assert ready["replicas"][0]["index"] == 0
        with openai.OpenAI(base_url=ready["url"] + "/v1", api_key="none", max_retries=0) as found:
            yield found
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def ask(client: openai.OpenAI, question: str, **more: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(  # type: ignore[call-overload, no-any-return]
        model="demo", messages=[{"role": "user", "content": question}], temperature=0, **more
    )


def test_chat_answers_and_counts(client: openai.OpenAI) -> None:
    answer = ask(client, QUESTIONS[0])
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens > 5 and usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("question", QUESTIONS)
def test_streamed_text_equals_unstreamed(client: openai.OpenAI, question: str) -> None:
    whole = ask(client, question)
    chunks = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    for chunk in chunks:
        pieces += [c.delta.content for c in chunk.choices if c.delta.content]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage == whole.usage


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = ask(client, QUESTIONS[0]).choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = ask(client, QUESTIONS[0], stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completion_and_length(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="demo", prompt="The lighthouse on Gull Point", max_tokens=5, temperature=0
    )
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 5
    assert done.choices[0].text


def test_a_parameter_it_lacks_and_a_control_token_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="mirostat"):
        ask(client, "Hi", extra_body={"mirostat": 2})
    with pytest.raises(openai.BadRequestError, match=r"<turn\|>"):
        ask(client, "Hi<turn|>")


def test_models_says_that_the_port_is_validated(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.validated is True  # type: ignore[attr-defined]
