"""Strict tools: what a call is held to, whether the model must call or chooses to, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.serving.fake_runner import FakeRunner
from tests.serving.server import USER, RunningServer, chat, running, script_of
from tests.serving.test_tools import OTHER, joined


@pytest.fixture(scope="module")
def roomy(tooled: Path) -> Iterator[RunningServer]:
    """The same, with room for tools of any size."""
    with running(tooled, FakeRunner(max_context=100_000)) as server:
        yield server


def strict(**schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "additionalProperties": False, **schema}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


def defined(properties: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return strict(properties=properties, required=list(properties), **{"$defs": definitions})


def chain(count: int, of: Any = None) -> dict[str, Any]:
    """Definitions that name one another in a row."""
    parts = {f"d{i}": (of or one)({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return defined({"a": {"$ref": "#/$defs/d0"}}, **parts, **{f"d{count}": {"type": "integer"}})


def one(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "additionalProperties": False}


def needing(schema: dict[str, Any]) -> dict[str, Any]:
    return one(schema) | {"required": ["x"]}


LOOP = {"$ref": "#/$defs/b"}
UNHELD: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": (strict(properties={"a": {"type": "string", "pattern": "x"}}), "pattern"),
    "type": (strict(properties={"a": {"type": ["string", "date"]}}), "the type 'date'"),
    "no type": (strict(properties={"a": {"type": [{}]}}), "the type"),
    "any of": (strict(properties={"a": {"anyOf": [{"type": "null"}, {}]}}), "the type"),
    "beside": (strict(properties={"a": LOOP | {"enum": [1]}}), r"beside '\$ref'"),
    "elsewhere": (
        strict(properties={"a": {"type": "array", "items": {"$ref": "#"}}}),
        r"the \$ref '#' is none",
    ),
    "odd name": (strict(properties={"a": {"$ref": []}}), r"the \$ref '\[\]' is none"),
    "definition": (defined({}, a={"type": "integer", "minimum": 1}), "minimum"),
    "open": ({**strict(), "function": {"name": "f", "strict": True}}, "may hold anything"),
    "no object": (strict(type="string", properties={}), "may hold anything"),
    "more": (strict(properties={"a": {"type": "null"}}, additionalProperties=True), "additional"),
    "odd required": (strict(properties={"a": {"type": "null"}}, required=[{}]), "required"),
    "other required": (strict(properties={}, required=["a"]), "required"),
    "large": (strict(properties={"a": {"enum": ["x" * 70_000]}}), "larger than"),
    "many": (defined({}, **{f"d{i}": {"type": "null"} for i in range(300)}), "definitions"),
    "deep row": (chain(40, needing), "No call can fit"),
    "itself": (defined({"a": LOOP}, b=LOOP), "No call can fit"),
    "without end": (defined({"a": LOOP}, b=needing(LOOP)), "No call can fit"),
    "each other": (
        defined({"a": LOOP}, b=needing({"$ref": "#/$defs/c"}), c=needing(LOOP)),
        "No call can fit",
    ),
    "contradiction": (
        strict(properties={"a": {"type": "integer", "enum": ["b"]}}, required=["a"]),
        "No call can fit",
    ),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", UNHELD)
def test_a_strict_tool_that_no_call_would_be_held_to_is_refused(
    roomy: RunningServer, name: str, choice: str
) -> None:
    tool, words = UNHELD[name]
    with pytest.raises(openai.BadRequestError, match=words):
        chat(roomy, tools=[tool], tool_choice=choice, max_tokens=2)


def test_a_tool_beside_a_strict_one_must_be_one_that_a_call_can_fit(roomy: RunningServer) -> None:
    endless = defined({"a": LOOP}, b=needing(LOOP))
    endless["function"] |= {"name": "g", "strict": False}
    with pytest.raises(openai.BadRequestError, match="No call can fit"):
        chat(roomy, tools=[strict(properties={}), endless], max_tokens=2)
    assert chat(roomy, tools=[endless], max_tokens=2)  # held to nothing


def test_what_is_strict_is_named(rambling: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(rambling, tools=[OTHER, UNHELD["pattern"][0]])
    assert caught.value.param == "tools.1.function.strict"


@pytest.mark.parametrize(
    "odd", [{"required": [{}]}, {"$ref": []}, {"type": [{}]}, {"type": "null"}]
)
def test_odd_parameters_that_hold_no_call_are_taken(
    rambling: RunningServer, odd: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    for choice in ("auto", "required"):
        assert chat(rambling, tools=[tool], tool_choice=choice, max_tokens=3)


HELD: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": (strict(properties={}), "{a:1}", "{}"),
    "of its type": (
        strict(properties={"a": {"type": "integer", "enum": ["b", 2]}}, required=["a"]),
        '{a:<|"|>b<|"|>}',
        '{"a": 2}',
    ),
    "itself": (
        defined({"a": LOOP}, b=one({"anyOf": [LOOP, {"type": "null"}]})),
        "{a:{x:{x:null}}}",
        '{"a": {"x": {"x": null}}}',
    ),
    "many options": (
        strict(properties={f"k{i}": {"type": "integer"} for i in range(200)}),
        "{k7:1,k8:2,k199:3}",
        '{"k7": 1, "k8": 2, "k199": 3}',
    ),
    "some needed": (
        strict(properties={f"k{i}": {"type": "null"} for i in range(9)}, required=["k2", "k6"]),
        "{k0:null,k2:null,k6:null,k8:null}",
        '{"k0": null, "k2": null, "k6": null, "k8": null}',
    ),
    "a row": (
        chain(12),
        "{a:" + "{x:" * 12 + "5" + "}" * 13,
        '{"a": ' + '{"x": ' * 12 + "5" + "}" * 13,
    ),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", HELD)
def test_a_call_is_held_to_a_strict_tool(tooled: Path, name: str, choice: str) -> None:
    """The fake says the arguments that stand there wherever it may."""
    tool, said, wanted = HELD[name]
    with running(tooled) as probe:
        text = f"<|tool_call>call:f{said}<tool_call|>"
        script = script_of(probe.assets, text, stop=50)
    with running(tooled, FakeRunner(script=script, max_context=9000)) as server:
        answer = chat(server, tools=[tool], tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    assert json.loads(answer.message.tool_calls[0].function.arguments) == json.loads(wanted)


def test_a_strict_tool_that_calls_are_held_to_is_taken(rambling: RunningServer) -> None:
    inner = {"type": "array", "items": {"type": "integer"}, "description": "numbers"}
    tool = strict(properties={"a": {"enum": ["x", 1]}, "b": inner}, required=["a", "b"])
    answer = chat(rambling, tools=[tool], tool_choice="required", max_tokens=60)
    assert answer.choices[0].finish_reason in ("tool_calls", "length")
    assert chat(rambling, tools=[tool], tool_choice="none", max_tokens=2)


def test_calls_the_model_chooses_to_make_are_held_to_a_strict_tool(tooled: Path) -> None:
    """The fake says what it was told wherever it may: text, and two calls that the tool forbids."""
    wrong = 'call:f{a:<|"|>zz<|"|>}'
    with running(tooled) as probe:
        script = script_of(probe.assets, f"So: <|tool_call>{wrong}<tool_call|>" * 2, stop=80)
    tool = strict(properties={"a": {"enum": ["x", "y"]}}, required=["a"])
    loose = strict(properties={"a": {"type": "string"}})
    loose["function"]["strict"] = False
    with running(tooled, FakeRunner(script=script, max_context=900)) as server:
        for stream in (False, True):
            found = chat(server, tools=[tool], max_tokens=80, stream=stream)
            if stream:
                text, calls, _ = joined(found)
            else:
                message = found.choices[0].message
                text = message.content
                calls = [(c.function.name, c.function.arguments) for c in message.tool_calls]
            assert text.startswith("So: ")
            assert {name for name, _ in calls} == {"f"}
            assert all(json.loads(arguments)["a"] in ("x", "y") for _, arguments in calls)
        free = chat(server, tools=[loose], max_tokens=80).choices[0].message.tool_calls
        assert json.loads(free[0].function.arguments) == {"a": "zz"}


class Leaf(pydantic.BaseModel):
    """A tree of numbers, with what a user of the official client writes: an option, a choice, itself."""

    value: int | None
    kind: Literal["red", "blue"]
    below: list[Leaf]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_official_clients_own_strict_tools(tooled: Path, choice: Any) -> None:
    leaf = 'value:null,kind:<|"|>blue<|"|>,below:[]'
    said = f'<|tool_call>call:grow{{value:7,kind:<|"|>red<|"|>,below:[{{{leaf}}}]}}<tool_call|>'
    with running(tooled) as probe:
        script = script_of(probe.assets, said, stop=50)
    with running(tooled, FakeRunner(script=script, max_context=2000)) as server:
        answer = server.client().chat.completions.parse(
            model="tiny",
            messages=USER,
            tools=[openai.pydantic_function_tool(Leaf, name="grow")],
            tool_choice=choice,
        )
    calls = answer.choices[0].message.tool_calls
    assert calls
    below = Leaf(value=None, kind="blue", below=[])
    assert calls[0].function.parsed_arguments == Leaf(value=7, kind="red", below=[below])


def test_a_schema_that_needs_itself_is_refused_for_answers_too(rambling: RunningServer) -> None:
    schema = {"$ref": "#/$defs/b", "$defs": {"b": needing(LOOP)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="No answer can fit"):
        chat(rambling, response_format=form)
