"""Which tokens the reference and the port are both run on: texts, prompts, sanity text.

In: tokenizer and template, the question set, window, context and buckets. Out: `GoldenPrompts`, ids only;
its digest names the set. Refused: a forced template that cannot be read (UsageError).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gemma_neuron.artifacts import digest_json
from gemma_neuron.chat import FAMILIES, ChatAssets, ChatTemplate, control_text
from gemma_neuron.errors import TemplateError, UsageError
from gemma_neuron.validation.questions import Question, QuestionSet, spread

FULL_LENGTH = 128
"""Texts up to this long keep every logit; longer ones the likeliest (design, section 2)."""
FULL_BYTES = 96 * 1024 * 1024
"""Of full float32 logits in one golden: 91 positions of a 262,144-wide vocabulary."""
SHORT_TEXTS = 4
LONG_TOKENS = 96
QUESTIONS = 40
SANITY_TOKENS = 300
LEAST_SANITY = 8
LEAST_LONG = 560
"""The long text passes position 513, where a public port went wrong (position 512 on)."""
SEED = 20260901
LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherText:
    """Token ids whose every next-token distribution is recorded."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyPrompt:
    """A prompt to go on with greedily, for `limit` tokens or until one of `stop_ids`."""

    name: str
    ids: tuple[int, ...]
    limit: int
    stop_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompts:
    """Everything a golden is made on. `sanity` ids are also shuffled with `seed`, BOS kept in front."""

    texts: tuple[TeacherText, ...]
    greedy: tuple[GreedyPrompt, ...]
    sanity: tuple[int, ...]
    seed: int = SEED

    @property
    def digest(self) -> str:
        return digest_json(asdict(self))

    @property
    def shuffled(self) -> tuple[int, ...]:
        """The sanity ids in another order, the first kept."""
        rest = list(self.sanity[1:])
        random.Random(self.seed).shuffle(rest)
        return (self.sanity[0], *rest)

    def text(self, name: str) -> TeacherText | None:
        return next((text for text in self.texts if text.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the port can hold: decides which lengths are worth a golden."""

    window: int
    max_context: int
    buckets: tuple[int, ...]
    vocab: int

    @property
    def long_length(self) -> int:
        """Tokens of the long text: past twice the window, 513 and every bucket, if the context allows."""
        wanted = max(2 * self.window + 40, LEAST_LONG, *(bucket + 8 for bucket in self.buckets))
        return min(self.max_context, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How questions become prompts. `template` is the model's own, or the one forced on it."""

    assets: ChatAssets
    template: ChatTemplate | None
    scope: str

    def prompt(self, name: str, question: Question, turns: Sequence[object] = ()) -> GreedyPrompt:
        """The question's prompt; `turns` replaces its conversation (after a tool's answer)."""
        if self.scope == "base" or self.template is None:
            text = question.prompt
        else:
            text = self.template.render(
                list(turns) or question.turns,  # type: ignore[arg-type]
                tools=question.tool_list,
                enable_thinking=question.thinking,
            )
        ids = self.assets.tokenizer.encode(text) if self.scope == "chat" else None
        return GreedyPrompt(
            name=name,
            ids=tuple(ids if ids else self.assets.completion_ids(text)),
            limit=question.limit,
            stop_ids=tuple(sorted(self.assets.stop_ids)),
            text=text,
        )


def forced_template(name: str, own: ChatTemplate | None) -> ChatTemplate:
    """The template of a file, or of a marker style by name (`gemma-3`, `gemma-4`, `none`)."""
    specials = own.specials if own is not None else {"bos_token": "<bos>"}
    if name == "none":
        body = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    else:
        family = next((f for f in FAMILIES if f.family.lower().replace(" ", "-") == name), None)
        if family is None:
            return _template_file(Path(name), specials)
        body = (
            "{% for m in messages %}"
            f"{family.turn_open}"
            "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}"
            f"{family.turn_end}\n"
            "{% endfor %}"
            f"{{% if add_generation_prompt %}}{family.turn_open}model\n{{% endif %}}"
        )
    return ChatTemplate("{{ bos_token }}" + body, "chat_template.jinja", specials)


def _template_file(path: Path, specials: dict[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), "chat_template.jinja", specials)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--chat-template {path} cannot be read: {error}.",
            "Name a template file, or one of gemma-3, gemma-4, none.",
        ) from error


def choose_prompts(talk: Conversation, questions: QuestionSet, reach: Reach) -> GoldenPrompts:
    """The prompts for one port. What exceeds its context is left out."""
    prompts = question_prompts(talk, questions, reach)
    sanity = talk.assets.completion_ids(questions.sanity.strip())
    if len(sanity) < LEAST_SANITY:
        raise UsageError(
            f"The sanity text of {questions.origin} has {len(sanity)} tokens; shuffling it shows something from "
            f"{LEAST_SANITY} on.",
            "Give it a paragraph of plain prose.",
        )
    sanity = sanity[: min(SANITY_TOKENS, reach.max_context)]
    long = TeacherText(name=LONG, ids=_long_ids(talk.assets, questions, reach.long_length))
    half = max(2, min(len(sanity) // 2, reach.max_context - LONG_TOKENS))
    after = GreedyPrompt(
        name="long-generation",
        ids=tuple(sanity[:half]),
        limit=min(LONG_TOKENS, reach.max_context - half),
        stop_ids=(),
    )
    shorts = _short_texts(talk, questions, prompts, reach)
    return GoldenPrompts(texts=(*shorts, long), greedy=(*prompts, after), sanity=tuple(sanity))


def question_prompts(
    talk: Conversation, questions: QuestionSet, reach: Reach
) -> tuple[GreedyPrompt, ...]:
    """One prompt per question of the scope, those the template refuses or the context lacks left out."""
    prompts = []
    for name, question in questions.for_scope(talk.scope):
        spelled = control_text([*question.turns], talk.assets)
        if spelled is not None:
            raise UsageError(
                f"Question {name} of {questions.origin} spells the control token {spelled!r}: encoding would turn its "
                "text into turns of the conversation.",
                "Write its turns as `messages`; the chat template puts the markers.",
            )
    for name, question in spread(questions.for_scope(talk.scope), QUESTIONS):
        try:
            prompt = talk.prompt(name, question)
        except TemplateError:
            continue
        if prompt.ids and len(prompt.ids) + prompt.limit <= reach.max_context:
            prompts.append(prompt)
    return tuple(prompts)


def _short_texts(
    talk: Conversation,
    questions: QuestionSet,
    prompts: Sequence[GreedyPrompt],
    reach: Reach,
) -> tuple[TeacherText, ...]:
    """A few prompts with their right answers behind them, as far as full logits may take space."""
    by_name = dict(questions.for_scope(talk.scope))
    room = FULL_BYTES // (4 * reach.vocab)
    texts = []
    for prompt in prompts[:SHORT_TEXTS]:
        answer = talk.assets.tokenizer.encode(
            " " * (talk.scope == "base") + by_name[prompt.name].answers[0]
        )
        ids = (*prompt.ids, *answer)[: min(FULL_LENGTH, room, reach.max_context)]
        if len(ids) < 2:
            break
        texts.append(TeacherText(name=f"text-{prompt.name}", ids=ids))
        room -= len(ids)
    return tuple(texts)


def _long_ids(assets: ChatAssets, questions: QuestionSet, length: int) -> tuple[int, ...]:
    """Exactly `length` ids of sentences in a seeded order that changes at each round."""
    sentences = re.split(r"(?<=[.!?])\s+|\n+", questions.sanity.strip())
    sentences += [
        f"{q.prompt or q.turns[-1].get('content', '')} {q.answers[0]}" for q in questions.questions
    ]
    order = random.Random(SEED)
    ids = assets.completion_ids(sentences[0])
    while len(ids) < length:
        order.shuffle(sentences)
        ids += assets.tokenizer.encode(" " + " ".join(sentences))
    return tuple(ids[:length])
