"""Where the assistant's words stand in a rendered conversation, by the template itself.

An answer is learned where the model will be asked for it: behind the prompt that serving renders. A template whose
generation prompt is what the history shows too (Gemma 3) gives one sequence for all answers of a conversation. One
that opens the answer otherwise, as Gemma 4's does with an empty thought that the history leaves out, gives a
sequence for each answer: in a single one all but the last would be learned at a place serving never has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.errors import TemplateError

Message = Mapping[str, Any]
Sequence_ = tuple[list[int], list[bool]]
"""Ids, and for each whether predicting it is learned."""


class Turns:
    """One template's way of writing answers. Raises TemplateError when it has none that can be told."""

    def __init__(self, assets: ChatAssets) -> None:
        self._assets = assets
        self._template = assets.need_template()
        asked = {"role": "user", "content": "x"}
        before = self._history([asked], None)
        answers = [
            self._history([asked, {"role": "assistant", "content": text}], None) for text in "ab"
        ]
        if not all(answer.startswith(before) for answer in answers):
            raise TemplateError(
                "The chat template writes a turn otherwise once an answer follows it: what belongs to the answer "
                "cannot be told.",
                "Use the model's own template.",
            )
        self._opening = _common_start(*(answer[len(before) :] for answer in answers))
        """What stands before an answer's first word in the history, such as `<|turn>model` and a newline."""

    def sequences(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> list[Sequence_]:
        """What is learned of a conversation. Raises TemplateError."""
        whole = self._history(messages, tools)
        found: list[Sequence_] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, answer, after = self._answer(messages, place, tools, whole)
            end = self._learned(answer, after)
            ids, learned = prompt + answer + after, [False] * len(prompt)
            learned += [position < end for position in range(len(ids) - len(prompt))]
            if found and ids[: len(found[-1][0])] == found[-1][0]:
                before = found.pop()[1]
                learned[: len(before)] = before
            found.append((ids, learned))
        return [_trimmed(sequence) for sequence in found]

    def _history(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        return self._template.render(messages, tools=tools, add_generation_prompt=False)

    def _answer(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[Message] | None,
        whole: str,
    ) -> tuple[list[int], list[int], list[int]]:
        """Ids of the prompt serving would render, of the answer with its end, and of the token after it where the
        template goes on in the same turn (a tool's answer)."""
        before = self._history(messages[:place], tools)
        asked = self._template.render(messages[:place], tools=tools)
        closed = self._history(messages[: place + 1], tools)
        if not closed.startswith(before):
            raise TemplateError(f"message {place + 1} changes how those before it are written")
        text = closed[len(before) :]
        if asked != before:
            if not text.startswith(self._opening):
                raise TemplateError(f"message {place + 1} does not open a turn of the assistant")
            text = text[len(self._opening) :]
        encode = self._assets.tokenizer.encode
        after = encode(whole[len(closed) :])[:1] if whole.startswith(closed) else []
        if not after or after[0] not in self._assets.stop_ids:
            after = []
        answer = encode(text)
        if not answer or answer[0] in self._assets.stop_ids:
            raise TemplateError(f"message {place + 1}, an assistant turn, is empty")
        return self._assets.completion_ids(asked), answer, after

    def _learned(self, answer: list[int], after: list[int]) -> int:
        """How many tokens of answer and after are learned: up to the one that makes serving stop."""
        stops = [place for place, token in enumerate(answer) if token in self._assets.stop_ids]
        return stops[-1] + 1 if stops else len(answer) + len(after)


def _trimmed(sequence: Sequence_) -> Sequence_:
    """Without what follows the last learned token."""
    ids, learned = sequence
    last = max(place for place, is_learned in enumerate(learned) if is_learned)
    return ids[: last + 1], learned[: last + 1]


def _common_start(one: str, other: str) -> str:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return one[:place]
    return min(one, other, key=len)
