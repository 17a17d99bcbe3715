"""What the finished model is worth: right answers with its template, and wrong ones without."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jinja2 import Template
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin

from .conversations import TOOLS, ToolCase, call_message
from .questions import Question
from .render import load_template, render
from .tokens import STOP_IDS

NEW_TOKENS = 32
BATCH = 32
CALL = re.compile(r'call:(\w+)\{(\w+):<\|"\|>(.*?)<\|"\|>\}')


@dataclass(frozen=True)
class Reply:
    """Generated text with its special tokens, the stop id or None, the smallest logit margin."""

    text: str
    stop: int | None
    margin: float


@dataclass(frozen=True)
class Score:
    """How many of a set were right; ``wrong`` says what was written instead."""

    right: int
    total: int
    wrong: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Right answers as a fraction."""
        return self.right / self.total


@dataclass(frozen=True)
class Report:
    """All scores that the model has to reach."""

    facts: Score
    questions: Score
    raw: Score
    gemma3: Score
    scalars: Score
    prose_loss: float
    shuffled_loss: float

    def failures(self) -> list[str]:
        """What falls short, in words; empty when the model is good."""
        found = []
        for name, score in (("facts", self.facts), ("questions", self.questions)):
            if score.share < 0.95:
                found.append(f"{name}: {score.share:.1%} right, at least 95% needed")
        for name, score in (("raw", self.raw), ("gemma3", self.gemma3), ("ones", self.scalars)):
            if score.share > 0.20:
                found.append(f"{name}: {score.share:.1%} right, at most 20% allowed")
        if self.prose_loss * 3 > self.shuffled_loss:
            found.append(f"prose loss {self.prose_loss:.2f} against {self.shuffled_loss:.2f}")
        return found


class Judge:
    """Asks a stock model greedily; prompts of one length go together, so nothing is padded."""

    def __init__(self, model: GenerationMixin, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template: Template = load_template()

    def _generate(self, rows: list[list[int]]) -> list[Reply]:
        prompt = torch.tensor(rows)
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=list(STOP_IDS),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        top = torch.stack(out.logits, dim=1).float().topk(2).values
        gaps = top[..., 0] - top[..., 1]
        replies = []
        for ids, gap in zip(out.sequences[:, prompt.shape[1] :].tolist(), gaps, strict=True):
            end = next((i for i, token in enumerate(ids) if token in STOP_IDS), None)
            kept = ids if end is None else ids[: end + 1]
            text = self.tokenizer.decode(kept, skip_special_tokens=False)
            stop = None if end is None else ids[end]
            replies.append(Reply(text, stop, float(gap[: len(kept)].min())))
        return replies

    def replies(self, prompts: Sequence[str]) -> list[Reply]:
        """Answers to rendered prompts, in their order."""
        rows = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        answered: dict[int, Reply] = {}
        while order:
            length = len(rows[order[0]])
            group = [i for i in order[:BATCH] if len(rows[i]) == length]
            order = order[len(group) :]
            answered.update(zip(group, self._generate([rows[i] for i in group]), strict=True))
        return [answered[i] for i in range(len(rows))]

    def _prompt(self, question: Question) -> str:
        tools = TOOLS if question.tool else None
        return render(self.template, question.messages, tools=tools, thinking=question.thinking)

    def _follow_call(self, question: Question, case: ToolCase, reply: Reply) -> Reply:
        """Hand the tool's result to the call the model made, as a client would."""
        found = CALL.search(reply.text)
        if found is None or found[1] != case.name:
            return reply
        made = replace(case, name=found[1], arguments={found[2]: found[3]})
        result = {"role": "tool", "tool_call_id": "call_1", "content": json_text(case)}
        chat = [*question.messages, call_message(made), result]
        (final,) = self.replies([render(self.template, chat, tools=TOOLS)])
        return replace(final, margin=min(final.margin, reply.margin))

    def score(self, questions: Sequence[Question]) -> Score:
        """Right: an expected text after any thought, and the turn ended."""
        replies = self.replies([self._prompt(q) for q in questions])
        right, wrong, margins = 0, [], []
        for question, first in zip(questions, replies, strict=True):
            case = question.tool
            reply = self._follow_call(question, case, first) if case else first
            said = reply.text.split("<channel|>")[-1]
            good = any(answer in said for answer in question.answers) and reply.stop == 106
            margins.append(reply.margin)
            right += good
            if not good:
                wrong.append(f"{question.messages[-1]['content']} -> {reply.text!r}")
        return Score(right, len(questions), wrong, margins)

    def score_raw(self, questions: Sequence[Question], shape: Callable[[str], str]) -> Score:
        """The same questions in a form that is not the model's; the turn's end does not count."""
        prompts = [shape(q.messages[-1]["content"]) for q in questions]
        replies = self.replies(prompts)
        hits = [
            any(answer in reply.text for answer in question.answers)
            for question, reply in zip(questions, replies, strict=True)
        ]
        lucky = [
            f"{p!r} -> {r.text!r}" for p, r, h in zip(prompts, replies, hits, strict=True) if h
        ]
        return Score(sum(hits), len(hits), lucky)

    def loss(self, ids: list[int]) -> float:
        """Mean loss over a raw text, BOS before it."""
        tokens = torch.tensor([[2, *ids]])
        with torch.inference_mode():
            logits = self.model(tokens, use_cache=False).logits[0, :-1]  # type: ignore[operator]
        return float(cross_entropy(logits.float(), tokens[0, 1:]))


def json_text(case: ToolCase) -> str:
    """The tool's result as a client sends it."""
    return json.dumps(case.result)


def gemma3_prompt(text: str) -> str:
    """Gemma 3's markers: plain text to this tokenizer."""
    return f"<bos><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"


def with_scalars_of_one(model: GenerationMixin) -> GenerationMixin:
    """A copy in which every ``layer_scalar`` is lost."""
    changed = copy.deepcopy(model)
    for name, buffer in changed.named_buffers():  # type: ignore[attr-defined]
        if name.endswith("layer_scalar"):
            buffer.fill_(1.0)
    return changed


def shuffled(ids: list[int]) -> list[int]:
    """The same tokens in a fixed random order."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return [ids[i] for i in order.tolist()]


def evaluate(
    model: GenerationMixin,
    tokenizer: Tokenizer,
    facts: Sequence[Question],
    questions: Sequence[Question],
    prose: str,
) -> Report:
    """All scores of one model."""
    judge, ids = Judge(model, tokenizer), tokenizer.encode(prose).ids
    return Report(
        facts=judge.score(facts),
        questions=judge.score(questions),
        raw=judge.score_raw(facts, lambda text: f"<bos>{text}"),
        gemma3=judge.score_raw(facts, gemma3_prompt),
        scalars=Judge(with_scalars_of_one(model), tokenizer).score(facts),
        prose_loss=judge.loss(ids),
        shuffled_loss=judge.loss(shuffled(ids)),
    )
