"""Request bodies of the OpenAI-shaped API. A field that is not here is not implemented: 400.

A field sent as null counts as not sent. Ranges are OpenAI's where it has the parameter, vLLM's where not.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

Number = Annotated[float, Field(allow_inf_nan=False, strict=False)]
MAX_CHOICES = 8
MAX_STOPS = 16
MAX_DEPTH = 64
MAX_FIELDS = 64
"""Of any object whose fields are named here; each unknown one is an error to be collected."""
MAX_PARTS = 1024
MAX_BIASES = 1024


def _whole_characters(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and cannot be encoded."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("the text holds half of a surrogate pair")
    return text


def _readable(value: dict[str, Any]) -> dict[str, Any]:
    """What is nested without bound ends in the recursion limit of whatever reads it next, and half of a surrogate pair
    in its encoder."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [[*v, *v.values()] if isinstance(v, dict) else v for v in level]
        level = [item for v in inner if isinstance(v, list) for item in v]
        for item in level:
            if isinstance(item, str):
                _whole_characters(item)
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _few(value: Any) -> Any:
    """Refused before the first of them is read."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"more than {MAX_BIASES} entries")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_readable)]
Text = Annotated[str, AfterValidator(_whole_characters)]
Stop = Annotated[Text, Field(min_length=1, max_length=1024)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
"""All lists fail fast: a body that is wrong in each of a million places is wrong in the first."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if len(data) > MAX_FIELDS:
                raise ValueError(f"more than {MAX_FIELDS} fields")
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(_Body):
    include_usage: StrictBool = False


class TemplateOptions(_Body):
    """`chat_template_kwargs`: what a request may tell the template; never the template itself."""

    enable_thinking: StrictBool = False


class SchemaFormat(_Body):
    name: Text
    description: Text | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")] = {}
    strict: StrictBool = False
    """An answer is held to the schema either way."""


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema stands with type json_schema, and only there")
        return self

    @property
    def schema_text(self) -> str | None:
        """The schema an answer is held to, as JSON."""
        if self.type == "text":
            return None
        return json.dumps(
            {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        )


class GenerationBody(_Body):
    """What both kinds of completion take."""

    model: Text | None = None
    """Any name is accepted; the answer names the model that is served."""
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_few)] = {}
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    stop_token_ids: Annotated[Ids, Field(max_length=64)] = []
    """As in vLLM: ids that end an answer like its own stop ids, and are not shown."""
    ignore_eos: StrictBool = False
    """As in vLLM: the model's own stop ids end nothing; for measuring."""
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    response_format: ResponseFormat | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    """Accepted and ignored: the server keeps no record of users."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class FunctionCall(_Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    arguments: Text = "{}"
    """A JSON object as text."""


class AskedCall(_Body):
    """A call of an earlier answer, sent back in the history."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object: templates write them in the model's own notation."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.function.name} are no JSON object")
        _readable(arguments)
        found = self.model_dump(exclude_none=True)
        return {**found, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] = ""
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[AskedCall], Field(max_length=128, fail_fast=True)] = []
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _parts_belong(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role tool, which needs it")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        for call in self.tool_calls:
            call.for_template()
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as the template sees it: only what was sent."""
        found = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: StrictBool = False
    """Calls that tool_choice asks for are held to names, types and enums of the parameters either way."""


class Tool(_Body):
    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    name: Text


class NamedChoice(_Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: StrictBool = True

    @property
    def offered(self) -> list[Tool]:
        """The tools an answer may call."""
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _choice_of_a_tool(self) -> ChatBody:
        if self.tool_choice not in ("none", "auto") and not self.offered:
            raise ValueError("tool_choice asks for a tool that is not in tools")
        if self.offered and self.response_format is not None and self.response_format.schema_text:
            raise ValueError(
                "response_format with tools is not implemented: ask for one of the two"
            )
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        return self


class CompletionBody(GenerationBody):
    """`prompt`: a text or token ids, or one or more of either in a list."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[Ids], Field(fail_fast=True)]
    )
    echo: StrictBool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as a text or as ids; a flat list of ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        if ids:
            return [ids]
        return [part for part in self.prompt if not isinstance(part, int)]
