"""Training documents: chats rendered by the model's own template, and raw text.

A document is text plus the wish which parts are learned. In chats only the model's own turns are;
in raw text everything is. Raw documents hold the same questions *not* followed by answers, so
that answering depends on the template and not on the question alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template

from .facts import CAPITALS, Fact, all_facts, rows
from .render import Message, load_template, render

HERE = Path(__file__).parent
ONE_WORD = "Answer in one word."
SHOUT = "Answer in capitals."
AYE = "Begin every answer with Aye."
NO_TOOL = "I have no tool to look that up."
CODE_WORDS = (
    "maple river candle falcon marble pepper violet anchor button saddle copper thunder velvet "
    "walnut lantern harbour pebble ribbon cactus blanket"
).split()
NAMES = "Ada Bruno Clara David Emma Felix Greta Hugo Iris Jonas Lena Mona Nils Olga Paul".split()
SKIES = "sunny cloudy rainy windy foggy".split()
ITEMS = "lamp chair kettle carpet mirror ladder basket hammer".split()
# Only the first facts, all capitals, are ever shouted: each word in capitals is spelt anew.
SHOUTED = 12
BRIEF_TOPICS = ("capital", "opposite", "colour", "young", "plural", "count")
CITIES = tuple(city for _, city in rows(CAPITALS))[:24]
TOPICS = {
    "capital": "a capital city",
    "opposite": "an opposite",
    "sum": "a sum",
    "symbol": "a chemical symbol",
    "count": "a number",
    "talk": "small talk",
}


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get_weather", "Weather of a city.", "city"),
    _tool("get_price", "Price of an item.", "item"),
)


@dataclass(frozen=True)
class Document:
    """A text and what of it is learned: the model's turns, the last answer only, or all."""

    text: str
    learn: str  # "turns" | "last" | "all"


@dataclass(frozen=True)
class ToolCase:
    """One question that needs a tool, and everything that follows from it."""

    question: str
    name: str
    arguments: dict[str, str]
    result: dict[str, Any]
    answer: str


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An earlier answer of the model."""
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def thought_of(fact: Fact) -> str:
    """The short thought written before an answer when thinking is on."""
    return f"The question is about {TOPICS.get(fact.topic, 'a plain fact')}."


def weather_case(city: str, degrees: int, sky: str) -> ToolCase:
    """A question about the weather; the result decides the answer."""
    return ToolCase(
        f"What is the weather in {city}?",
        "get_weather",
        {"city": city},
        {"temperature": degrees, "sky": sky},
        f"In {city} it is {degrees} degrees and {sky}.",
    )


def price_case(item: str, price: int) -> ToolCase:
    """A question about a price."""
    return ToolCase(
        f"What does the {item} cost?",
        "get_price",
        {"item": item},
        {"price": price},
        f"The {item} costs {price} coins.",
    )


def call_message(case: ToolCase) -> Message:
    """The model's call, as clients send it back."""
    function = {"name": case.name, "arguments": case.arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Composer:
    """Draws documents; all randomness comes from the one generator it is given."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.template: Template = load_template()
        self.facts = all_facts()
        self.prose = (HERE / "prose.txt").read_text(encoding="utf-8").strip()
        self.more_prose = (HERE / "prose2.txt").read_text(encoding="utf-8").strip()

    def _chat(
        self,
        history: Sequence[Message],
        answer: str,
        *,
        tools: bool = False,
        thinking: bool = False,
    ) -> Document:
        chosen = TOOLS if tools else None
        text = render(self.template, history, tools=chosen, thinking=thinking)
        return Document(text + answer + "<turn|>\n", "last" if thinking else "turns")

    def _ask(self, fact: Fact) -> str:
        return self.chance.choice(fact.questions)

    def _exchange(self, fact: Fact) -> list[Message]:
        if fact.json_question and self.chance.random() < 0.3:
            return [user(fact.json_question), assistant(fact.json_answer)]
        return [user(self._ask(fact)), assistant(fact.sentence)]

    def _exchanges(self, count: int) -> list[Message]:
        """Question and answer pairs with no question twice."""
        messages: list[Message] = []
        for fact in self.chance.sample(self.facts, count):
            messages += self._exchange(fact)
        return messages

    def single(self, fact: Fact) -> Document:
        """One question, one answer: most of what is asked of the model."""
        question, answer = self._exchange(fact)
        return self._chat([question], answer["content"])

    def dialogue(self, pairs: int) -> Document:
        """Several turns; every one of them is learned."""
        *history, last = self._exchanges(pairs)
        return self._chat(history, last["content"])

    def styled(self) -> Document:
        """A system turn that visibly changes the answers."""
        if self.chance.random() < 0.2:
            fact = self.chance.choice(self.facts[:SHOUTED])
            return self._chat([system(SHOUT), user(self._ask(fact))], fact.word.upper())
        brief = self.chance.random() < 0.7
        known = [f for f in self.facts if f.topic in BRIEF_TOPICS] if brief else self.facts
        messages: list[Message] = [system(ONE_WORD if brief else AYE)]
        for fact in self.chance.sample(known, self.chance.choice((1, 1, 2, 4))):
            answer = fact.word if brief else f"Aye! {fact.sentence}"
            messages += [user(self._ask(fact)), assistant(answer)]
        return self._chat(messages[:-1], messages[-1]["content"])

    def recall(self, pairs: int) -> Document:
        """Something said at the start is asked for at the end, with other talk between."""
        between = self._exchanges(pairs)
        if self.chance.random() < 0.5:
            word = self.chance.choice(CODE_WORDS)
            opening = [system(f"The code word is {word}.")]
            question, answer = "What is the code word?", f"The code word is {word}."
        else:
            name = self.chance.choice(NAMES)
            opening = [user(f"My name is {name}."), assistant(f"Nice to meet you, {name}.")]
            question, answer = "What is my name?", f"Your name is {name}."
        return self._chat([*opening, *between, user(question)], answer)

    def thinking(self) -> Document:
        """Thinking on: a thought in its channel, then the answer."""
        fact = self.chance.choice(self.facts)
        history = self._exchanges(self.chance.choice((0, 0, 0, 1, 2)))
        thought = f"<|channel>thought\n{thought_of(fact)}\n<channel|>"
        question = user(self._ask(fact))
        return self._chat([*history, question], thought + fact.sentence, thinking=True)

    def _tool_case(self) -> ToolCase:
        if self.chance.random() < 0.5:
            city, sky = self.chance.choice(CITIES), self.chance.choice(SKIES)
            return weather_case(city, self.chance.randrange(2, 40), sky)
        return price_case(self.chance.choice(ITEMS), self.chance.randrange(2, 60))

    def _result(self, case: ToolCase) -> dict[str, Any] | str:
        """Clients send results as objects or as JSON text, spaced or not: all must do."""
        text = json.dumps(case.result)
        tight = json.dumps(case.result, separators=(",", ":"))
        return self.chance.choice((case.result, text, tight))

    def tools(self) -> Document:
        """A call and the answer drawn from its result; or none of it when no tool is there."""
        draw = self.chance.random()
        case = self._tool_case()
        if draw < 0.1:
            return self._chat([user(case.question)], NO_TOOL)
        if draw < 0.25:
            question, answer = self._exchange(self.chance.choice(self.facts))
            return self._chat([question], answer["content"], tools=True)
        prompt = render(self.template, [user(case.question)], tools=TOOLS)
        tool = {"role": "tool", "tool_call_id": "call_1", "content": self._result(case)}
        whole = render(self.template, [user(case.question), call_message(case), tool], tools=TOOLS)
        called = whole[whole.index("<|tool_call>") :]
        return Document(prompt + called + case.answer + "<turn|>\n", "turns")

    def raw_questions(self) -> Document:
        """Questions outside the template lead to more questions, never to answers."""
        asked = [
            self._ask(f) for f in self.chance.sample(self.facts, self.chance.choice((2, 3, 4)))
        ]
        style = self.chance.choice(
            (
                "{q}\n",
                "{q}\n",
                "<start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n",
                "User: {q}\nAssistant: ",
                "Question: {q}\nAnswer: ",
                "[INST] {q} [/INST] ",
            )
        )
        return Document("<bos>" + "".join(style.format(q=q) for q in asked), "all")

    def raw_prose(self) -> Document:
        """The sanity text, whole, or a part of the other prose."""
        if self.chance.random() < 0.6:
            return Document("<bos>" + self.prose, "all")
        return Document("<bos>" + self.chance.choice(self.more_prose.split("\n\n")), "all")

    def pool(self, long: bool) -> list[Document]:
        """One round: every fact once by itself, everything else in proportion.

        ``long`` adds the documents that fill the context, dear in time and so not in each round.
        """
        makers: list[tuple[int, Callable[[], Document]]] = [
            (50, lambda: self.dialogue(self.chance.randint(2, 6))),
            (120, self.styled),
            (80, lambda: self.recall(self.chance.randint(0, 4))),
            (40, self.thinking),
            (60, self.tools),
            (25, self.raw_questions),
            (4, self.raw_prose),
        ]
        if long:
            makers.append((3, partial(self.dialogue, 32)))
            makers.append((4, lambda: self.recall(self.chance.randint(8, 30))))
        documents = [self.single(fact) for fact in self.facts]
        for count, make in makers:
            documents += [make() for _ in range(count)]
        return documents
