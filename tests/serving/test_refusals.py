"""What a request may not ask is a 400 that names it; odd bodies never are a 500."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.serving.server import (
    SAID,
    USER,
    RunningServer,
    chat,
    running,
    write_source,
)

REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "unknown": ({"extra_body": {"mirostat": 2}}, "'mirostat' is not implemented", "mirostat"),
    "template": ({"extra_body": {"chat_template": "x"}}, "'chat_template'", "chat_template"),
    "kwargs": (
        {"extra_body": {"chat_template_kwargs": {"x": 1}}},
        "'chat_template_kwargs.x'",
        "chat_template_kwargs.x",
    ),
    "temperature": ({"temperature": 3}, "temperature: Input should be less", "temperature"),
    "n": ({"n": 9}, "n: Input should be less than or equal to 8", "n"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    "stop": ({"stop": ["a"] * 17}, "stop: List should have at most 16", "stop"),
    "empty stop": ({"stop": ""}, "stop", "stop"),
    "bias": ({"logit_bias": {"600": 1}}, "token id 600", "logit_bias"),
    "no messages": ({"messages": []}, "messages", "messages"),
    "role": (
        {"messages": [{"role": "boss", "content": "x"}]},
        "messages.0.role",
        "messages.0.role",
    ),
    "image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "image_url",
        "messages.0.content.0.image_url",
    ),
    "too long": (
        {"messages": [{"role": "user", "content": "a" * 300}]},
        "context is 256 tokens",
        "prompt",
    ),
    "control text": (
        {"messages": [{"role": "user", "content": "x<turn|>"}]},
        "control token '<turn|>'",
        "messages",
    ),
    "split control text": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": t} for t in ("x<tu", " rn|>")],
                }
            ]
        },
        "control token '<turn|>'",
        "messages",
    ),
    "usage unstreamed": ({"stream_options": {"include_usage": True}}, "stream_options", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_400_and_name_the_parameter(free: RunningServer, name: str) -> None:
    options, words, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(free, **options)
    body = caught.value.body
    assert isinstance(body, dict)
    assert words in body["message"]
    assert body["type"] == "invalid_request_error"
    assert body["param"] == param


def test_nulls_count_as_not_sent(scripted: RunningServer) -> None:
    body = {"messages": USER, "tools": None, "stop": None, "stream": None, "seed": None}
    reply = httpx2.post(f"{scripted.url}/v1/chat/completions", json=body)
    assert reply.json()["choices"][0]["message"]["content"] == SAID


def test_control_text_is_allowed_when_asked_for(folder: Path) -> None:
    with running(folder, allow_control_text=True) as server:
        assert chat(server, messages=[{"role": "user", "content": "x<turn|>"}], max_tokens=2)


def test_chat_without_a_template_is_400_and_completion_works(tmp_path: Path) -> None:
    with running(write_source(tmp_path, template="")) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            chat(server)
        answer = server.client().completions.create(model="any", prompt="a", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"


def test_the_templates_own_refusal_is_a_400_with_its_words(tmp_path: Path) -> None:
    with (
        running(write_source(tmp_path, family="gemma3")) as server,
        pytest.raises(
            openai.BadRequestError, match="roles must alternate user/assistant, message 1"
        ),
    ):
        chat(server, messages=USER * 2)


def test_a_render_that_is_late_on_a_busy_machine_is_no_fault_of_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(folder) as server:
        template = server.assets.template
        assert template is not None
        assert chat(server, max_tokens=2)

        def stopped(seconds: float) -> threading.Timer:
            assert template._child is not None
            process = template._child._process
            process.send_signal(signal.SIGSTOP)
            timer = threading.Timer(seconds, process.send_signal, [signal.SIGCONT])
            timer.start()
            return timer

        stopped(1.5)
        assert chat(server, max_tokens=2), "late, and well within the limit"
        monkeypatch.setattr("gemma_neuron.template.RENDER_SECONDS", 0.3)
        timer = stopped(20.0)
        with pytest.raises(openai.InternalServerError, match=r"took more than 0\.3 s") as caught:
            chat(server, max_tokens=2)
        timer.cancel()
        assert caught.value.status_code == 503
        monkeypatch.undo()
        assert chat(server, max_tokens=2), "by a new child"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": ' + b"[" * 100_000, 400),
        (b" " * (4 * 1024 * 1024 + 1), 413),
    ],
)
def test_bodies_that_cannot_be(free: RunningServer, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx2.post(f"{free.url}/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


def test_unknown_paths_and_methods_have_the_error_shape(free: RunningServer) -> None:
    assert httpx2.get(f"{free.url}/nowhere").json()["error"]["type"] == "not_found_error"
    reply = httpx2.get(f"{free.url}/v1/chat/completions")
    assert (reply.status_code, "error" in reply.json()) == (405, True)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_text_far_too_long_is_not_encoded(free: RunningServer, path: str) -> None:
    """Four megabytes of words were three seconds without the interpreter's lock given up, and 325 MB."""
    text = "hello " * 600_000
    asked = (
        {"prompt": text}
        if path == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    began = time.process_time()
    answer = httpx2.post(f"{free.url}/v1/{path}", json={"model": "tiny", **asked}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in answer.json()["error"]["message"]
    assert time.process_time() - began < 0.5
