"""From token events to an answer: visible text, thoughts apart, tool calls read, stop strings, counts.

Streamed and whole answers both go through here, so they are equal by construction.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from gemma_neuron.chat import ChatAssets, StopStrings, StreamDecoder
from gemma_neuron.serving.notation import NotACall, read_call
from gemma_neuron.serving.requests import FinishReason, TokenEvent, TokenLogprob


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, in OpenAI's terms: `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Delta:
    """What one event added to an answer. Text may belong to earlier tokens that were held back."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read out of an answer's tokens. A plain completion shows all text as it is: nothing."""

    thoughts: bool = False
    calls: bool = False
    one_call: bool = False
    """The answer ends behind its first call."""


CHAT = Reading(thoughts=True)


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    assets: ChatAssets
    stops: Sequence[str] = ()
    reading: Reading = CHAT
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: int = 0
    """Generated tokens, the stop token included."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    _stop: StopStrings = field(init=False)
    _decoder: StreamDecoder = field(init=False)
    _thoughts: _Thoughts | None = field(init=False, default=None)
    _call: _Call | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._stop = StopStrings(self.stops)
        self._decoder = StreamDecoder(self.assets.tokenizer)

    def feed(self, event: TokenEvent) -> Delta:
        """Take one event; after a delta with `finish` there is nothing more to take."""
        delta = Delta(logprob=event.logprob)
        if event.prompt is not None:
            self.prompt_logprobs = event.prompt
        if event.token is not None:
            self.tokens += 1
            if event.logprob is not None:
                self.logprobs.append(event.logprob)
            if event.finish != "stop":
                self._take_token(event.token, delta)
        if self._stop.found is not None:
            self.finish = "stop"
        elif self.calls and self.reading.one_call:
            self.finish = "tool_calls"
        elif event.finish is not None:
            self.finish, self.error = event.finish, event.error
            self._flush(delta)
        if self.finish == "stop" and self.calls:
            self.finish = "tool_calls"
        delta.finish = self.finish
        self.text += delta.text
        self.reasoning += delta.reasoning
        return delta

    def _take_token(self, token: int, delta: Delta) -> None:
        markers, tokenizer = self.assets.markers, self.assets.tokenizer
        if self._thoughts is not None:
            delta.reasoning += self._thoughts.feed(token)
            if self._thoughts.closed:
                self._thoughts = None
        elif self._call is not None:
            if self._call.feed(token):
                self._end_call(delta)
        elif self.reading.thoughts and _opens(token, self.assets, "thought"):
            self._leave_text(delta)
            self._thoughts = _Thoughts(self.assets)
        elif self.reading.calls and _opens(token, self.assets, "call"):
            self._leave_text(delta)
            assert markers is not None and markers.call_close is not None
            self._call = _Call(tokenizer.id_of(markers.call_close))
        else:
            delta.text += self._stop.feed(self._decoder.feed([token]))

    def _leave_text(self, delta: Delta) -> None:
        delta.text += self._stop.feed(self._decoder.finish())
        self._decoder = StreamDecoder(self.assets.tokenizer)

    def _end_call(self, delta: Delta) -> None:
        """A call that is none, or that was cut off, is shown as the text it is."""
        assert self._call is not None
        text = self.assets.tokenizer.decode(self._call.ids, skip_special=False)
        self._call = None
        try:
            name, arguments = read_call(text)
        except NotACall:
            delta.text += self._stop.feed(text)
            return
        written = json.dumps(arguments, ensure_ascii=False)
        delta.call = ToolCall(f"call_{secrets.token_hex(12)}", name, written)
        self.calls.append(delta.call)

    def _flush(self, delta: Delta) -> None:
        """The end: what was held back comes out, unless it completes a stop string after all."""
        if self._thoughts is not None:
            delta.reasoning += self._thoughts.finish()
        if self._call is not None:
            self._end_call(delta)
        delta.text += self._stop.feed(self._decoder.finish())
        if self._stop.found is not None:
            self.finish, self.error = "stop", ""
        else:
            delta.text += self._stop.finish()


def _opens(token: int, assets: ChatAssets, what: str) -> bool:
    """Whether the token opens a thought or a call, in a family that closes them too."""
    markers = assets.markers
    if markers is None:
        return False
    pair = {
        "thought": (markers.thought_open, markers.thought_close),
        "call": (markers.call_open, markers.call_close),
    }[what]
    if pair[0] is None or pair[1] is None:
        return False
    return token == assets.tokenizer.id_of(pair[0])


class _Call:
    """The inside of a tool call, as ids up to its closing mark."""

    def __init__(self, close: int | None) -> None:
        self._close = close
        self.ids: list[int] = []

    def feed(self, token: int) -> bool:
        """Whether this token closed it."""
        if token == self._close:
            return True
        self.ids.append(token)
        return False


class _Thoughts:
    """The inside of a thought channel: its name's line is dropped, its closing marker ends it."""

    def __init__(self, assets: ChatAssets) -> None:
        assert assets.markers is not None
        assert assets.markers.thought_close is not None
        self._close = assets.tokenizer.id_of(assets.markers.thought_close)
        self._decoder = StreamDecoder(assets.tokenizer)
        self._name: str | None = ""
        """The channel's name as far as it is known; None after its line ended."""
        self.closed = False

    def feed(self, token: int) -> str:
        if token == self._close:
            self.closed = True
            return self.finish()
        return self._after_name(self._decoder.feed([token]))

    def finish(self) -> str:
        return self._after_name(self._decoder.finish())

    def _after_name(self, text: str) -> str:
        if self._name is None:
            return text
        self._name += text
        if "\n" not in self._name:
            return ""
        rest, self._name = self._name.split("\n", 1)[1], None
        return rest
