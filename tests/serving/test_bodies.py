"""Bodies that cost far more than their bytes, too many bytes of them at once, and text that is none: never a 500."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import openai
import pytest
from pydantic import ValidationError

from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.api_types import ChatBody, CompletionBody
from gemma_neuron.serving.bodies import MAX_VALUES, BodyLimits
from gemma_neuron.serving.sampling import scored_logprob, token_logprob
from tests.serving.server import USER, RunningServer, chat, running

JSON = {"content-type": "application/json"}
MiB = 2**20
MANY = 20_000
BAD_BODIES: dict[str, tuple[type[ChatBody | CompletionBody], dict[str, Any]]] = {
    "prompts": (CompletionBody, {"prompt": [{}] * MANY}),
    "prompts of ids": (CompletionBody, {"prompt": [[{}] * MANY]}),
    "messages": (ChatBody, {"messages": [{}] * MANY}),
    "parts": (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    "good parts": (
        ChatBody,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]},
    ),
    "calls": (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [{}] * 128}]}),
    "tools": (ChatBody, {"messages": USER, "tools": [{}] * 128}),
    "stops": (ChatBody, {"messages": USER, "stop": [1] * MANY}),
    "stop ids": (ChatBody, {"messages": USER, "stop_token_ids": ["a"] * MANY}),
    "fields": (ChatBody, {"messages": USER, **{f"x{i}": 1 for i in range(MANY)}}),
    "biases": (ChatBody, {"messages": USER, "logit_bias": {f"x{i}": 1 for i in range(MANY)}}),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_what_is_wrong_in_many_places_is_few_errors(name: str) -> None:
    model, body = BAD_BODIES[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 6


def whole(item: str, before: str, after: str) -> bytes:
    """As many items as the size limit of a body lets through."""
    count = (4 * MiB - len(before) - len(after)) // len(item)
    return f"{before}{(item * count).rstrip(',')}{after}".encode()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


COSTLY = {
    "objects": ("completions", whole("{},", '{"prompt":[', "]}")),
    "lists": ("completions", whole("[],", '{"prompt":[', "]}")),
    "texts": ("completions", whole('"",', '{"prompt":[', "]}")),
    "ids": ("completions", whole("1,", '{"prompt":[', "]}")),
    "parts": (
        "chat/completions",
        whole("{},", '{"messages":[{"role":"user","content":[', "]}]}"),
    ),
    "fields": (
        "chat/completions",
        ("{" + ",".join(f'"{i:x}":1' for i in range(400_000)) + "}").encode(),
    ),
    "bias": (
        "chat/completions",
        ('{"logit_bias":{' + ",".join(f'"{i}":1' for i in range(300_000)) + "}}").encode(),
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_body_costs_neither_memory_nor_time(free: RunningServer, name: str) -> None:
    path, body = COSTLY[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = peak_bytes(), time.monotonic()
    reply = httpx2.post(f"{free.url}/v1/{path}", content=body, headers=JSON)
    assert time.monotonic() - began < 2.0
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"The body holds more than {MAX_VALUES} values."
    assert peak_bytes() - before < 50 * MiB


def test_commas_and_brackets_within_a_text_are_no_values(free: RunningServer) -> None:
    said = '{[,"\\' * 70_000
    body = json.dumps({"messages": [{"role": "user", "content": said}]})
    url = f"{free.url}/v1/chat/completions"
    reply = httpx2.post(url, content=body, headers=JSON, timeout=120)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def begun(server: RunningServer, size: int, sent: int) -> socket.socket:
    """A connection whose body of `size` bytes has come as far as `sent`."""
    found = urlsplit(server.url)
    client = socket.create_connection((found.hostname, found.port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{found.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    client.sendall(head.encode() + b" " * sent)
    return client


def status_of(client: socket.socket) -> int:
    with client, client.makefile("rb") as lines:
        return int(lines.readline().split()[1])


def test_the_largest_unfinished_bodies_make_room(folder: Path) -> None:
    rules = AccessRules(bodies=BodyLimits(held_bytes=3 * MiB, body_seconds=20.0))
    with running(folder, rules=rules) as server:
        small = begun(server, 1000, 500)
        large = [begun(server, 2 * MiB, 2 * MiB - 1) for _ in range(4)]
        for client in large[:3]:
            client.settimeout(8)
        refused = [status_of(client) for client in large[:3]]
        assert refused == [503] * 3
        assert chat(server, max_tokens=2).choices[0].finish_reason == "length"
        small.sendall(b" " * 500)
        assert status_of(small) == 400, "read whole, and no JSON"
        large[3].sendall(b" ")
        assert status_of(large[3]) == 400
        for _ in range(6):  # each counts no more once it is answered
            assert status_of(begun(server, 2 * MiB, 2 * MiB)) == 400


def test_a_body_that_waits_for_an_answer_to_begin_counts(folder: Path) -> None:
    """Whole, it cannot be dropped: the next one that is too many is refused."""
    rules = AccessRules(bodies=BodyLimits(held_bytes=100_000))
    with running(folder, rules=rules) as server:
        server.runner.step_seconds = 0.3
        body = json.dumps({"prompt": "a", "max_tokens": 20}).encode()
        slow = begun(server, 90_000, 0)
        slow.sendall(body + b" " * (90_000 - len(body)))
        deadline = time.monotonic() + 10
        while not server.runner.calls and time.monotonic() < deadline:
            time.sleep(0.01)
        assert status_of(begun(server, 20_000, 20_000)) == 503
        server.runner.step_seconds = 0.0
        assert status_of(slow) == 200
        assert status_of(begun(server, 20_000, 20_000)) == 400


IDS = [2, *range(110, 365)]
"""As long as the context."""


def test_a_prompt_that_needs_no_answer_may_fill_the_context(free: RunningServer) -> None:
    client = free.client()
    options: dict[str, Any] = {"model": "any", "prompt": IDS, "echo": True, "logprobs": 0}
    answer = client.completions.create(max_tokens=0, **options)
    assert len(answer.choices[0].logprobs.token_logprobs) == len(IDS) == 256
    with pytest.raises(openai.BadRequestError, match="at least 1"):
        client.completions.create(max_tokens=1, **options)


def test_log_probabilities_of_prompts_are_bounded_and_the_graphs_own(
    free: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = free.client()
    options: dict[str, Any] = {"model": "any", "echo": True, "max_tokens": 0}
    monkeypatch.setattr("gemma_neuron.serving.openai_completions.MAX_PROMPT_LOGPROBS", 100)
    with pytest.raises(openai.BadRequestError, match=r"150 log-prob.*100 are") as caught:
        client.completions.create(prompt=[IDS[:10], IDS[:15]], logprobs=5, **options)
    assert caught.value.param == "logprobs"
    monkeypatch.setattr("gemma_neuron.serving.work.token_logprob", None)  # looks at all logits
    answer = client.completions.create(prompt=IDS[:20], logprobs=4, **options)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == 20
    assert all(len(top) <= 4 for top in found.top_logprobs[1:])


def test_scored_tokens_are_what_all_logits_say() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=500) * 3).astype(np.float32)
    wanted = token_logprob(logits, 7, 5)
    total = float(np.log(np.exp(logits.astype(np.float64)).sum()))
    found = scored_logprob(logits, 7, float(logits[7]) - total, total, 5)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert found.logprob == pytest.approx(wanted.logprob)
    assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top])


def test_a_streamed_echo_without_text_is_told_once(free: RunningServer) -> None:
    stream = free.client().completions.create(
        model="any", prompt=[2], echo=True, logprobs=0, max_tokens=3, stream=True
    )
    found = [chunk.choices[0].logprobs for chunk in stream]
    tokens = [token for one in found if one is not None for token in one.tokens or []]
    assert tokens.count("<bos>") == 1
    assert len(tokens) == 4


HALF = "\\ud800"
CALL = {"name": "f", "arguments": json.dumps({"a": ["\ud800"]})}
HALVES: dict[str, str] = {
    "content": '{"messages": [{"role": "user", "content": "H"}]}',
    "part": '{"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}]}]}',
    "field": '{"messages": [{"role": "user", "content": "x"}], "H": 1}',
    "bias": '{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"H": 1}}',
    "model": '{"messages": [{"role": "user", "content": "x"}], "model": "H"}',
    "user": '{"messages": [{"role": "user", "content": "x"}], "user": "H"}',
    "stop": '{"messages": [{"role": "user", "content": "x"}], "stop": ["H"]}',
    "role": '{"messages": [{"role": "H", "content": "x"}]}',
    "prompt": '{"prompt": "H"}',
    "prompts": '{"prompt": ["x", "H"]}',
    "schema": """{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema",
        "json_schema": {"name": "s", "schema": {"enum": ["H"]}}}}""",
    "tool": """{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [["H"]]}}}}}]}""",
    "tool's key": """{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function",
        "function": {"name": "f", "parameters": {"properties": {"H": {}}}}}]}""",
    "call": json.dumps(
        {
            "messages": [
                *USER,
                {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            ]
        }
    ),
}


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_half_of_a_surrogate_pair_is_a_400_wherever_it_stands(
    free: RunningServer, allowing: RunningServer, name: str, allowed: bool
) -> None:
    server = allowing if allowed else free
    path = "completions" if "prompt" in name else "chat/completions"
    body = HALVES[name].replace("H", HALF)
    reply = httpx2.post(f"{server.url}/v1/{path}", content=body, headers=JSON)
    assert reply.status_code == 400, reply.text


@pytest.fixture(scope="module")
def allowing(folder: Path) -> Iterator[RunningServer]:
    with running(folder, allow_control_text=True) as server:
        yield server


def test_a_body_without_length_is_limited_too(folder: Path) -> None:
    rules = AccessRules(bodies=BodyLimits(body_bytes=1000, body_seconds=0.3))
    with running(folder, rules=rules) as server:
        headers = {"content-type": "application/json"}
        url = f"{server.url}/v1/chat/completions"

        def many() -> Iterator[bytes]:
            for _ in range(5):
                yield b" " * 500

        assert httpx2.post(url, content=many(), headers=headers).status_code == 413

        def slow() -> Iterator[bytes]:
            yield b"{"
            time.sleep(1.0)
            yield b"}"

        assert httpx2.post(url, content=slow(), headers=headers).status_code == 408
