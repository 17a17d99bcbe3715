"""The API as clients use it: the official `openai` package over a real socket."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.chat.templates import GEMMA4_LARGE
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import (
    SAID,
    USER,
    RunningServer,
    chat,
    running,
    script_of,
    streamed,
    write_source,
)


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
