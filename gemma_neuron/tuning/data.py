"""A file of conversations → token sequences as the model will meet them, learned on the assistant's turns alone.

In: JSON lines, each `{"messages": [{"role", "content"}, …], "tools": […]}` or, for a base model, `{"text": "…"}`; the
model's tokenizer and template. Out: `Sample`s. Refused, all lines at once and before anything starts: what is no JSON
or no conversation, roles the template does not take, control tokens spelled in text, nothing to learn, too many tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.chat import ChatAssets, control_text, rendered_control_text
from gemma_neuron.errors import TemplateError, UsageError
from gemma_neuron.strict_json import BadJsonError, parse_json
from gemma_neuron.tuning.turns import Turns

SHOWN = 10
"""Bad lines that are named one by one; the rest are counted."""
LONGEST_LINE = 16 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NO_FUNCTIONS = 'is no list of {"function": {"name": …}}'
Progress = Callable[[str], None]


class DataError(UsageError):
    """The data file cannot be trained on; the message names its lines."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. `learned[i]`: whether predicting `ids[i]` from what stands before it counts."""

    line: int
    ids: tuple[int, ...]
    learned: tuple[bool, ...]

    @property
    def targets(self) -> int:
        return sum(self.learned)


class _BadLineError(Exception):
    """Why one line cannot be used."""


def read_samples(
    path: Path, assets: ChatAssets, longest: int, progress: Progress = lambda _: None
) -> list[Sample]:
    """All samples of a file; a conversation gives one, or one for each answer where the template asks for it.

    `longest`: tokens a sample may have. Raises DataError, or TemplateError when the model's template is unusable.
    """
    turns = Turns(assets) if assets.template is not None else None
    found: list[Sample] = []
    bad: list[tuple[int, str]] = []
    for number, data in _lines(path):
        try:
            found += _samples(number, data, assets, turns, longest)
        except _BadLineError as error:
            bad.append((number, str(error)))
        progress(f"data: line {number}, {len(found)} samples")
    if bad:
        raise _refusal(path, bad)
    if not found:
        raise DataError(
            f"--data {path} holds no conversation.",
            'Write one a line: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
        )
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, by their number from 1."""
    if not path.is_file():
        raise DataError(
            f"--data {path} is {'no file' if path.exists() else 'not there'}.",
            "Name a file with a JSON object of messages on each line.",
        )
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"--data {path}: line {number} has more than {LONGEST_LINE:,} bytes.",
                    "Is it JSON lines, one conversation a line?",
                )
            if line.strip():
                yield number, line


def _refusal(path: Path, bad: Sequence[tuple[int, str]]) -> DataError:
    named = "; ".join(f"line {number}: {why}" for number, why in bad[:SHOWN])
    more = f"; and {len(bad) - SHOWN} more lines" if len(bad) > SHOWN else ""
    return DataError(
        f"--data {path} cannot be trained on: {named}{more}.",
        "Correct or remove these lines; nothing was started.",
    )


def _samples(
    number: int, data: bytes, assets: ChatAssets, turns: Turns | None, longest: int
) -> list[Sample]:
    """The samples of one line. Raises _BadLineError."""
    value = _object(data.removeprefix(BYTE_ORDER_MARK) if number == 1 else data)
    if isinstance(value.get("text"), str) and "messages" not in value:
        return [_bounded(_text(number, value["text"], assets), longest)]
    messages, tools = _conversation(value)
    if turns is None:
        raise _BadLineError(
            'a conversation, and the model has no chat template; "text" is learned as it stands'
        )
    spelled = control_text([*messages, *(tools or [])], assets)
    try:
        spelled = spelled or rendered_control_text(messages, assets, tools=tools)
        if spelled is not None:
            raise _BadLineError(f"a message or tool spells the control token {spelled}")
        sequences = turns.sequences(messages, tools)
    except TemplateError as error:
        raise _BadLineError(
            f"the model's chat template refuses it: {error.message.rstrip('.')}"
        ) from error
    return [
        _bounded(Sample(number, tuple(ids), tuple(learned)), longest) for ids, learned in sequences
    ]


def _bounded(sample: Sample, longest: int) -> Sample:
    if len(sample.ids) > longest:
        raise _BadLineError(f"{len(sample.ids)} tokens, --max-length is {longest}")
    return sample


def _text(number: int, text: str, assets: ChatAssets) -> Sample:
    """Plain text: all of it is learned, behind BOS."""
    spelled = control_text([{"content": text}], assets)
    if spelled is not None:
        raise _BadLineError(f"the text spells the control token {spelled}")
    ids = assets.completion_ids(text)
    if len(ids) < 2:
        raise _BadLineError("the text is empty")
    return Sample(number, tuple(ids), (False, *[True] * (len(ids) - 1)))


def _object(data: bytes) -> dict[str, Any]:
    """Raises _BadLineError."""
    try:
        value = parse_json(data)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise _BadLineError(
            f"{half} is half of a character, and its other half is not there"
        ) from error
    except BadJsonError as error:
        raise _BadLineError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _BadLineError('no object with a list "messages"')
    return value


def _conversation(
    value: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of one line. Raises _BadLineError."""
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _BadLineError('no object with a list "messages"')
    for place, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _BadLineError(f'message {place} is no object with a "role"')
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not calls:
            raise _BadLineError(f'message {place} has no "content"')
        if not isinstance(content, str | list | None):
            raise _BadLineError(
                f'the "content" of message {place} is neither text nor a list of parts'
            )
        if calls and not _functions(calls):
            raise _BadLineError(f'the "tool_calls" of message {place} {NO_FUNCTIONS}')
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadLineError("no assistant turn: there is nothing to learn")
    tools = value.get("tools")
    if tools is not None and not _functions(tools):
        raise _BadLineError(f'"tools" {NO_FUNCTIONS}')
    if "text" in value:
        raise _BadLineError('"text" beside "messages": one of them is what is learned')
    return messages, tools


def _functions(value: object) -> bool:
    """Whether it is a list of {"function": {"name": …}}: templates write others as tools without a name."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("function"), dict)
        and isinstance(each["function"].get("name"), str)
        for each in value
    )


def sample_file(samples: Sequence[Sample]) -> bytes:
    """All samples as safetensors: ids int32 and learned uint8 [tokens], offsets int64 [samples + 1]."""
    import numpy as np
    from safetensors.numpy import save

    ids = np.fromiter((token for sample in samples for token in sample.ids), dtype=np.int32)
    learned = np.fromiter((is_it for sample in samples for is_it in sample.learned), np.uint8)
    offsets = np.cumsum([0, *(len(sample.ids) for sample in samples)], dtype=np.int64)
    return save({"ids": ids, "learned": learned, "offsets": offsets})
