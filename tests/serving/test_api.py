"""The API as clients use it: the official `openai` package over a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.service import placeholder_ids, sampling_defaults
from tests.chat.templates import GEMMA4_LARGE
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import RunningServer, running, script_of, write_source

USER: list[Any] = [{"role": "user", "content": "hello"}]
SAID = "It is the end, é and 😀: STOP here and there."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def free(folder: Path) -> Iterator[RunningServer]:
    """A server whose answers depend on the prompt."""
    with running(folder) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(folder: Path) -> Iterator[RunningServer]:
    """A server that always says SAID and ends its turn."""
    with running(folder) as probe:
        script = script_of(probe.assets, SAID)
    with running(folder, FakeRunner(script=script)) as server:
        yield server


def chat(server: RunningServer, **options: Any) -> Any:
    return server.client().chat.completions.create(**({"model": "any", "messages": USER} | options))


def streamed(server: RunningServer, **options: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Text and finish reason by choice, and the usage, of a streamed chat."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    counts = None
    for chunk in chat(server, stream=True, stream_options={"include_usage": True}, **options):
        counts = chunk.usage or counts
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, counts


def test_chat(scripted: RunningServer) -> None:
    answer = chat(scripted)
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(scripted.assets.prompt_ids(USER))
    assert answer.usage.completion_tokens == len(scripted.assets.tokenizer.encode(SAID)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 7},
        {"stop": ["STOP"]},
        {"stop": "é and 😀"},
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11, "max_completion_tokens": 40},
    ],
)
def test_streamed_equals_unstreamed(
    free: RunningServer, scripted: RunningServer, options: dict[str, Any]
) -> None:
    for server in (free, scripted):
        whole = chat(server, **options)
        texts, reasons, counts = streamed(server, **options)
        assert texts == {c.index: c.message.content for c in whole.choices}
        assert reasons == {c.index: c.finish_reason for c in whole.choices}
        assert counts == whole.usage


def test_stop_string_across_token_borders(scripted: RunningServer) -> None:
    answer = chat(scripted, stop=["TOP h", "nowhere"])
    assert answer.choices[0].message.content == "It is the end, é and 😀: S"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < len(scripted.assets.tokenizer.encode(SAID))
    # A stop string that never completes holds nothing back for good.
    assert chat(scripted, stop=["there.!"]).choices[0].message.content == SAID


def test_seed_decides_the_text_and_choices_differ(free: RunningServer) -> None:
    options = {"temperature": 1.0, "max_tokens": 20}
    first = chat(free, seed=1, n=3, **options)
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) == 3
    assert chat(free, seed=1, **options).choices[0].message.content == texts[0]
    assert chat(free, seed=2, **options).choices[0].message.content != texts[0]
    unseeded = {chat(free, **options).choices[0].message.content for _ in range(3)}
    assert len(unseeded) == 3


def test_concurrent_clients_get_what_they_get_alone(free: RunningServer) -> None:
    prompts = [f"question {i}" for i in range(12)]

    def answer(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text = chat(free, messages=messages, max_tokens=25).choices[0].message.content
        assert isinstance(text, str)
        return text

    alone = [answer(prompt) for prompt in prompts]
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: found.update({p: answer(p)})) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == alone


def test_completions(free: RunningServer, scripted: RunningServer) -> None:
    client = scripted.client()
    answer = client.completions.create(model="any", prompt="Once", max_tokens=100)
    assert answer.choices[0].text == SAID
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(scripted.assets.tokenizer.encode("Once"))
    echoed = client.completions.create(model="any", prompt="Once", echo=True, max_tokens=5)
    assert echoed.choices[0].text.startswith("Once")
    assert echoed.choices[0].finish_reason == "length"

    client = free.client()
    ids = free.assets.completion_ids("Once upon")
    by_text = client.completions.create(model="any", prompt="Once upon", max_tokens=9)
    by_ids = client.completions.create(model="any", prompt=ids, max_tokens=9)
    assert by_text.choices[0].text == by_ids.choices[0].text
    several = client.completions.create(
        model="any", prompt=["Once", "Once upon"], max_tokens=9, n=2
    )
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[2].text == by_text.choices[0].text
    pieces = client.completions.create(model="any", prompt="Once upon", max_tokens=9, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == by_text.choices[0].text


def test_completion_logprobs_with_echo_score_the_prompt(free: RunningServer) -> None:
    client = free.client()
    ids = free.assets.completion_ids("the end is here")
    answer = client.completions.create(
        model="any", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.tokens is not None
    assert len(found.token_logprobs) == len(ids) + 1
    first, *others = map(str, found.token_logprobs)
    assert first == "None"  # which the client's own types do not foresee
    assert all(float(value) < 0 for value in others)
    assert "".join(found.tokens[1:]) == answer.choices[0].text
    only = client.completions.create(model="any", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert only.choices[0].text == "the end is here"
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


def test_chat_logprobs(scripted: RunningServer) -> None:
    answer = chat(scripted, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert content[0].token == "I"
    assert content[0].logprob == pytest.approx(0.0, abs=1e-6)


def test_thinking_is_kept_apart(tmp_path: Path) -> None:
    folder = write_source(tmp_path, template=GEMMA4_LARGE)
    said = "<|channel>thought\nhm, é\nso<channel|>The end."
    with running(folder) as probe:
        script = script_of(probe.assets, said)
        thoughtless = probe.assets.prompt_ids(USER)
    with running(folder, FakeRunner(script=script)) as server:
        options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        message = chat(server, **options).choices[0].message
        assert message.content == "The end."
        assert message.reasoning_content == "hm, é\nso"
        assert streamed(server, **options)[0] == {0: "The end."}
        reasoning = ""
        for chunk in chat(server, stream=True, **options):
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        assert reasoning == "hm, é\nso"
        assert chat(server).usage.prompt_tokens == len(thoughtless)
        # Unfinished thoughts are no content.
        cut = chat(server, max_tokens=12, **options).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length")


def test_tok_13_thought_after_a_tools_answer_does_not_leak(tmp_path: Path) -> None:
    folder = write_source(tmp_path, template=GEMMA4_LARGE)
    with running(folder) as probe:
        script = script_of(probe.assets, "Well. <|channel>thought\nagain<channel|>Done.")
    with running(folder, FakeRunner(script=script)) as server:
        message = chat(server).choices[0].message
        assert message.content == "Well. Done."
        assert message.reasoning_content == "again"


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "unknown": ({"extra_body": {"mirostat": 2}}, "'mirostat' is not implemented", "mirostat"),
    "tools": ({"tools": []}, "'tools' is not implemented", "tools"),
    "format": (
        {"response_format": {"type": "json_object"}},
        "'response_format'",
        "response_format",
    ),
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


def test_models_say_whether_they_are_validated(folder: Path, free: RunningServer) -> None:
    model = free.client().models.list().data[0]
    assert model.id == "tiny"
    assert model.validated is True  # type: ignore[attr-defined]
    assert free.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="There is no model"):
        free.client().models.retrieve("other")
    with running(folder, validated=False, verdict=None) as server:
        entry = httpx2.get(f"{server.url}/v1/models").json()["data"][0]
        assert entry["validated"] is False
        assert "unvalidated" in entry["note"]


def test_not_ready_until_loaded(folder: Path) -> None:
    with running(folder, load=False) as server:
        assert httpx2.get(f"{server.url}/health/live").json() == {"status": "live"}
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "starting")
        with pytest.raises(openai.InternalServerError, match="not ready"):
            chat(server)
        server.engine.start()
        assert server.engine.wait_loaded(30)
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["phase"]) == (200, "ready")
        assert ready.json()["replicas"][0]["index"] == 0


def test_engine_failure_is_an_error_in_stream_and_answer_and_ends_readiness(folder: Path) -> None:
    runner = FakeRunner()
    runner.fail_after = 4
    with running(folder, runner) as server:
        with pytest.raises(openai.APIError, match="device lost"):
            for _ in chat(server, stream=True):
                pass
        assert httpx2.get(f"{server.url}/health/ready").status_code == 503
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
    runner = FakeRunner()
    runner.fail_after = 4
    with running(folder, runner) as server, pytest.raises(openai.InternalServerError, match="lost"):
        chat(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(folder: Path, stream: bool) -> None:
    runner = FakeRunner(slots=1, max_context=10_000, step_seconds=0.005)
    with running(folder, runner) as server:
        if stream:
            answer = chat(server, stream=True)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                server.client(timeout=0.3).chat.completions.create(model="any", messages=USER)
        began = time.monotonic()
        chat(server, max_tokens=2)
        assert time.monotonic() - began < 5


def test_an_answer_past_the_time_limit_is_an_error(folder: Path) -> None:
    runner = FakeRunner(max_context=10_000, step_seconds=0.01)
    with (
        running(folder, runner, request_seconds=0.2) as server,
        pytest.raises(openai.InternalServerError, match=r"longer than 0\.2 s"),
    ):
        chat(server)


GOOD = {"messages": USER, "max_tokens": 2}
ACCESS: dict[str, tuple[dict[str, str], int]] = {
    "plain": ({}, 200),
    "name": ({"host": "localhost:9"}, 200),
    "rebinding": ({"host": "evil.example:8000"}, 403),
    "loopback prefix": ({"host": "127.0.0.1.evil.example"}, 403),
    "foreign origin": ({"origin": "https://evil.example"}, 403),
    "null origin": ({"origin": "null"}, 403),
    "own origin": ({"host": "localhost:9", "origin": "http://localhost:9"}, 200),
    "form post": ({"content-type": "text/plain"}, 415),
    "no type": ({"content-type": ""}, 415),
    "charset": ({"content-type": "application/json; charset=utf-8"}, 200),
}


@pytest.mark.parametrize("name", ACCESS)
def test_host_origin_and_content_type(free: RunningServer, name: str) -> None:
    headers, status = ACCESS[name]
    reply = httpx2.post(f"{free.url}/v1/chat/completions", json=GOOD, headers=headers)
    assert reply.status_code == status
    assert "access-control-allow-origin" not in reply.headers
    if status != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    if "host" in headers:
        listed = httpx2.get(f"{free.url}/v1/models", headers=headers)
        assert listed.status_code == status


def test_no_cors_preflight(free: RunningServer) -> None:
    reply = httpx2.request(
        "OPTIONS",
        f"{free.url}/v1/chat/completions",
        headers={"origin": "https://evil.example", "access-control-request-method": "POST"},
    )
    assert reply.status_code == 403


def test_key(folder: Path) -> None:
    with running(folder, rules=AccessRules(api_key="secret")) as server:
        with pytest.raises(openai.AuthenticationError):
            chat(server)
        assert server.client(api_key="secret").models.list().data
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        assert httpx2.get(f"{server.url}/health/ready").status_code == 401
        for wrong in ("secret", "Bearer secre", "Bearer secret2", "bearer é"):
            reply = httpx2.get(
                f"{server.url}/v1/models", headers=[(b"authorization", wrong.encode())]
            )
            assert reply.status_code == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": ' + b"[" * 100_000, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b" " * (4 * 1024 * 1024 + 1), 413),
    ],
)
def test_bodies_that_cannot_be(free: RunningServer, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx2.post(f"{free.url}/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


def test_a_body_without_length_is_limited_too(folder: Path) -> None:
    rules = AccessRules(body_bytes=1000, body_seconds=0.3)
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


def test_unknown_paths_and_methods_have_the_error_shape(free: RunningServer) -> None:
    assert httpx2.get(f"{free.url}/nowhere").json()["error"]["type"] == "not_found_error"
    reply = httpx2.get(f"{free.url}/v1/chat/completions")
    assert (reply.status_code, "error" in reply.json()) == (405, True)


def test_sampling_defaults_are_the_models(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path).temperature == 0.0
    file.write_text('{"temperature": 1.0, "top_k": 64}')
    assert sampling_defaults(tmp_path).temperature == 0.0
    file.write_text('{"do_sample": true, "top_k": 64, "top_p": 0.95}')
    found = sampling_defaults(tmp_path)
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 64, 0.95)


def test_placeholder_ids_come_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"image_token_id": 258880, "boi_token_index": 255999, "bos_token_id": 2, "audio_token_id": null}'
    )
    assert placeholder_ids(tmp_path) == (255999, 258880)
