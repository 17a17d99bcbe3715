"""Tools as the official client uses them: offered, called, held to, sent back; and answers held to a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gemma_neuron.serving.notation import NotACall, read_call
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import USER, RunningServer, chat, running, script_of, write_source

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "wind": {"type": "boolean"},
                "place": {"type": "object", "properties": {"code": {"enum": [1, 2]}}},
            },
            "required": ["unit", "place"],
        },
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "other"}}
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,-2.5e0],deep:{on:true,off:null}}<tool_call|>'
ARGUMENTS = {"city": "Paris", "days": [1, -2.5], "deep": {"on": True, "off": None}}


@pytest.fixture(scope="module")
def calling(tooled: Path) -> Iterator[RunningServer]:
    """Says `So: `, calls twice and stops where the tool's answer belongs."""
    with running(tooled) as probe:
        script = script_of(probe.assets, f"So: {CALL}{CALL}", stop=50)
    with running(tooled, FakeRunner(script=script, max_context=900)) as server:
        yield server


def joined(chunks: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Text, calls by index, finish reason of a stream."""
    text, reason = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or []:
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (
                name + (part.function.name or ""),
                arguments + part.function.arguments,
            )
    return text, [calls[i] for i in sorted(calls)], reason


@pytest.mark.fault("tok-14-tool-stream")
def test_calls_are_read_whole_and_streamed(calling: RunningServer) -> None:
    choice = chat(calling, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So: "
    first, second = choice.message.tool_calls
    assert first.function.name == "get_weather"
    assert json.loads(first.function.arguments) == ARGUMENTS
    assert first.id != second.id
    text, calls, reason = joined(chat(calling, tools=[WEATHER], stream=True))
    assert (text, reason) == ("So: ", "tool_calls")
    assert calls == [("get_weather", first.function.arguments)] * 2


def test_one_call_where_parallel_ones_are_not_wanted(calling: RunningServer) -> None:
    choice = chat(calling, tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


def test_without_tools_there_are_no_calls(calling: RunningServer) -> None:
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = chat(calling, **options).choices[0].message
        assert message.tool_calls is None
        assert "call:get_weather" in message.content


def test_a_call_that_is_cut_off_or_none_is_shown_as_text(tooled: Path) -> None:
    with running(tooled) as probe:
        script = script_of(probe.assets, "<|tool_call>call:f{a:}<tool_call|>x")
    with running(tooled, FakeRunner(script=script)) as server:
        message = chat(server, tools=[WEATHER]).choices[0].message
        assert (message.content, message.tool_calls) == ("call:f{a:}x", None)
        cut = chat(server, tools=[WEATHER], max_tokens=5).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("call", "length")


def test_a_conversation_with_calls_is_rendered_in_the_templates_form(
    rambling: RunningServer,
) -> None:
    asked = {"id": "c1", "type": "function"}
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {**asked, "function": {"name": "get_weather", "arguments": '{"unit": "C"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = chat(rambling, messages=history, tools=[WEATHER], max_tokens=1)
    wanted = rambling.assets.prompt_text(
        [
            *USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {**asked, "function": {"name": "get_weather", "arguments": {"unit": "C"}}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        tools=[WEATHER],
    )
    assert 'call:get_weather{unit:<|"|>C<|"|>}' in wanted
    assert wanted.endswith("<tool_response|>")
    assert answer.usage.prompt_tokens == len(rambling.assets.tokenizer.encode(wanted))


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_asked_for_comes_and_fits_its_parameters(
    rambling: RunningServer, seed: int
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    options = {"temperature": 1.0, "seed": seed, "tools": [OTHER, WEATHER]}
    for extra in ({}, {"stream": True}):
        found = chat(rambling, tool_choice=named, **options, **extra)
        if extra:
            text, calls, reason = joined(found)
        else:
            message, reason = found.choices[0].message, found.choices[0].finish_reason
            text = message.content or ""
            calls = [(c.function.name, c.function.arguments) for c in message.tool_calls]
        assert (text, reason, calls[0][0]) == ("", "tool_calls", "get_weather")
        arguments = json.loads(calls[0][1])
        assert arguments["unit"] in ("C", "F")
        assert arguments["place"].get("code") in (None, 1, 2)
        assert set(arguments) <= {"unit", "wind", "place"}


def test_an_answer_is_held_to_a_schema(rambling: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "list": {"type": "array", "maxItems": 3}},
        "required": ["kind", "list"],
        "additionalProperties": False,
    }
    schema["properties"]["list"]["items"] = {"type": "boolean"}  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(4):
        choice = chat(rambling, response_format=form, temperature=1.0, seed=seed).choices[0]
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found["kind"] in ("a", "b")
        assert all(isinstance(item, bool) for item in found["list"])
    started = chat(rambling, response_format={"type": "json_object"}, max_tokens=1)
    assert started.choices[0].message.content == "{"
    assert chat(rambling, response_format={"type": "text"}, max_tokens=1)


def test_thinking_comes_before_what_is_held_to_a_schema(tooled: Path) -> None:
    """The fake says what it was told wherever it may: a thought, then text that the schema forbids."""
    with running(tooled) as probe:
        thought = script_of(probe.assets, "<|channel>thought\nhm<channel|>true", stop=1)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [True]}}}
    with running(tooled, FakeRunner(script=thought)) as server:
        thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        message = chat(server, response_format=form, **thinking).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "true")


def test_bad_schemas_and_choices_are_400(rambling: RunningServer, tmp_path: Path) -> None:
    def form(schema: object) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    deep: dict[str, Any] = {"type": "boolean"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    asked = {"function": {"name": "f", "arguments": '{"a":' * 300 + "1" + "}" * 300}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"response_format": form({"type": "objct"})}, "objct"),
        ({"response_format": form({"enum": ["x" * 70_000]})}, "larger than 65536 bytes"),
        ({"response_format": form({"pattern": "("})}, "regex"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "one of the two"),
        ({"tool_choice": "required"}, "not in tools"),
        ({"response_format": form(deep)}, "nested deeper"),
        (
            {"response_format": form({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}})},
            "fit|used",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
            "nested",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [asked]}]}, "nested deeper"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "absent"}},
            },
            "not in tools",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "content"),
    ]
    for options, words in refused:
        with pytest.raises(openai.BadRequestError, match=words):
            chat(rambling, **options)
    control = {"type": "function", "function": {"name": "f", "description": "<turn|>"}}
    with pytest.raises(openai.BadRequestError, match="control token"):
        chat(rambling, tools=[control])
    with (
        running(write_source(tmp_path, family="gemma3")) as server,
        pytest.raises(openai.BadRequestError, match="does not know tools"),
    ):
        chat(server, tools=[WEATHER])


def test_the_notation() -> None:
    assert read_call('call:f{a:<|"|>x,}<|"|>,b:{}}') == ("f", {"a": "x,}", "b": {}})
    assert read_call(' call:a.b-c{ "x" : 1 }'.replace('"x"', "x")) == ("a.b-c", {"x": 1})
    for text in ("", "call:", "call:f", "call:f{a}", "call:f{a:1", "call:f{a:1}x", "f{}"):
        with pytest.raises(NotACall):
            read_call(text)
    with pytest.raises(NotACall):
        read_call("call:f{a:" + "[" * 100_000)
