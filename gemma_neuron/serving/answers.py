"""From token events to an answer's text: visible text, thinking apart, stop strings, counts.

Streamed and whole answers both go through here, so they are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemma_neuron.chat import ChatAssets, StopStrings, StreamDecoder
from gemma_neuron.serving.requests import FinishReason, TokenEvent, TokenLogprob


@dataclass(slots=True)
class Delta:
    """What one event added to an answer. Text may belong to earlier tokens that were held back."""

    text: str = ""
    reasoning: str = ""
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@dataclass(slots=True)
class Answer:
    """One answer as it grows. `split_thoughts`: chat; a plain completion shows all text as it is."""

    assets: ChatAssets
    stops: Sequence[str] = ()
    split_thoughts: bool = True
    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    """Generated tokens, the stop token included."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    _stop: StopStrings = field(init=False)
    _decoder: StreamDecoder = field(init=False)
    _thoughts: _Thoughts | None = field(init=False, default=None)

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
        elif event.finish is not None:
            self.finish, self.error = event.finish, event.error
            self._flush(delta)
        delta.finish = self.finish
        self.text += delta.text
        self.reasoning += delta.reasoning
        return delta

    def _take_token(self, token: int, delta: Delta) -> None:
        if self._thoughts is not None:
            delta.reasoning += self._thoughts.feed(token)
            if self._thoughts.closed:
                self._thoughts = None
        elif self.split_thoughts and self._opens_thought(token):
            delta.text += self._stop.feed(self._decoder.finish())
            self._decoder = StreamDecoder(self.assets.tokenizer)
            self._thoughts = _Thoughts(self.assets)
        else:
            delta.text += self._stop.feed(self._decoder.feed([token]))

    def _opens_thought(self, token: int) -> bool:
        markers = self.assets.markers
        if markers is None or markers.thought_open is None or markers.thought_close is None:
            return False
        return token == self.assets.tokenizer.id_of(markers.thought_open)

    def _flush(self, delta: Delta) -> None:
        """The end: what was held back comes out, unless it completes a stop string after all."""
        if self._thoughts is not None:
            delta.reasoning += self._thoughts.finish()
        delta.text += self._stop.feed(self._decoder.finish())
        if self._stop.found is not None:
            self.finish, self.error = "stop", ""
        else:
            delta.text += self._stop.finish()


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
