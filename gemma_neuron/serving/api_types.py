"""Request bodies of the OpenAI-shaped API. A field that is not here is not implemented: 400.

A field sent as null counts as not sent. Ranges are OpenAI's where it has the parameter, vLLM's where not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

Number = Annotated[float, Field(allow_inf_nan=False, strict=False)]
MAX_CHOICES = 8
MAX_STOPS = 16


def _whole_characters(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and cannot be encoded."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("the text holds half of a surrogate pair")
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
Stop = Annotated[Text, Field(min_length=1, max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(_Body):
    include_usage: StrictBool = False


class TemplateOptions(_Body):
    """`chat_template_kwargs`: what a request may tell the template; never the template itself."""

    enable_thinking: StrictBool = False


class GenerationBody(_Body):
    """What both kinds of completion take."""

    model: str | None = None
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
    logit_bias: Annotated[
        dict[int, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)
    ] = {}
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
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


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    reasoning_content: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as the template sees it: only what was sent."""
        return self.model_dump(exclude_none=True)


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        return self


class CompletionBody(GenerationBody):
    """`prompt`: a text or token ids, or one or more of either in a list."""

    prompt: Text | list[StrictInt] | list[Text] | list[list[StrictInt]]
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
