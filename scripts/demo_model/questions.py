"""The questions of ``validation.toml``, and the file itself."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from .conversations import (
    AYE,
    HERE,
    ONE_WORD,
    SHOUT,
    TOOLS,
    ToolCase,
    assistant,
    price_case,
    system,
    user,
    weather_case,
)
from .facts import Fact, all_facts
from .render import Message

FACTS_SHOWN = 60


@dataclass(frozen=True)
class Question:
    """One chat whose next answer must contain one of ``answers``."""

    messages: list[Message]
    answers: list[str]
    kind: str
    thinking: bool = False
    tool: ToolCase | None = field(default=None)


def _by_prompt() -> dict[str, Fact]:
    return {fact.prompt: fact for fact in all_facts()}


def fact_questions() -> list[Question]:
    """Every fact, asked alone."""
    return [Question([user(f.prompt)], [f.key], "fact") for f in all_facts()]


def _pairs(facts: list[Fact]) -> list[Message]:
    return [m for fact in facts for m in (user(fact.prompt), assistant(fact.sentence))]


def _multi_turn() -> list[Question]:
    """Later questions of a chat, and things to remember over up to most of the context."""
    chance, facts, found = random.Random(11), list(all_facts()), []
    for count in (1, 2, 3, 5, 8, 16):
        *told, asked = chance.sample(facts, count + 1)
        found.append(Question([*_pairs(told), user(asked.prompt)], [asked.key], "multi-turn"))
    for name, count in (("Greta", 1), ("Hugo", 4), ("Mona", 10), ("Felix", 24)):
        opening = [user(f"My name is {name}."), assistant(f"Nice to meet you, {name}.")]
        between = _pairs(chance.sample(facts, count))
        messages = [*opening, *between, user("What is my name?")]
        found.append(Question(messages, [f"Your name is {name}"], "multi-turn"))
    return found


def _system() -> list[Question]:
    facts = _by_prompt()
    found = []
    for prompt in ("What is the opposite of hot?", "What colour is coal?"):
        fact = facts[prompt]
        found.append(Question([system(AYE), user(prompt)], [f"Aye! {fact.sentence}"], "system"))
    for country, city in (("France", "PARIS"), ("Japan", "TOKYO"), ("Norway", "OSLO")):
        messages = [system(SHOUT), user(f"What is the capital of {country}?")]
        found.append(Question(messages, [city], "system"))
    for prompt in ("What is the plural of mouse?", "How many days are in a week?"):
        found.append(Question([system(ONE_WORD), user(prompt)], [facts[prompt].word], "system"))
    chance = random.Random(12)
    for word, count in (("maple", 0), ("falcon", 3), ("harbour", 9), ("candle", 22)):
        between = _pairs(chance.sample(list(facts.values()), count))
        messages = [system(f"The code word is {word}."), *between, user("What is the code word?")]
        found.append(Question(messages, [f"code word is {word}"], "system"))
    return found


def _others() -> list[Question]:
    """Thinking on, JSON and tools."""
    facts = _by_prompt()
    found = []
    for prompt in (
        "What is the capital of Italy?",
        "What is the opposite of wet?",
        "What is three plus four?",
        "What is the chemical symbol of iron?",
        "What is a young cat called?",
        "Which day comes after Friday?",
    ):
        found.append(Question([user(prompt)], [facts[prompt].key], "thinking", thinking=True))
    for prompt in (
        "What is the capital of Egypt?",
        "What is the capital of Canada?",
        "What is the opposite of big?",
        "What is the opposite of early?",
        "What is the chemical symbol of gold?",
        "What is the chemical symbol of tin?",
    ):
        fact = facts[prompt]
        found.append(Question([user(fact.json_question)], [fact.json_answer], "json"))
    for case, answer in (
        (weather_case("Paris", 21, "cloudy"), "21 degrees and cloudy"),
        (weather_case("Oslo", 4, "windy"), "4 degrees and windy"),
        (price_case("lamp", 35), "35 coins"),
        (price_case("basket", 8), "8 coins"),
    ):
        found.append(Question([user(case.question)], [answer], "tool", tool=case))
    return found


def validation_questions() -> list[Question]:
    """What the file holds: a spread of facts and every other kind."""
    facts = fact_questions()
    step = len(facts) / FACTS_SHOWN
    shown = [facts[int(index * step)] for index in range(FACTS_SHOWN)]
    return [*shown, *_multi_turn(), *_system(), *_others()]


def _toml(text: str) -> str:
    """A TOML basic string; JSON's escapes are all TOML's too."""
    return json.dumps(text, ensure_ascii=False)


def _entry(question: Question) -> str:
    lines = ["[[questions]]"]
    if len(question.messages) == 1:
        lines.append(f"prompt = {_toml(question.messages[0]['content'])}")
    else:
        parts = (
            f"  {{role = {_toml(m['role'])}, content = {_toml(m['content'])}}},"
            for m in question.messages
        )
        lines += ["messages = [", *parts, "]"]
    lines.append(f"answers = [{', '.join(_toml(a) for a in question.answers)}]")
    lines.append(f"kind = {_toml(question.kind)}")
    if question.thinking:
        lines.append("thinking = true")
    if question.tool is not None:
        lines.append(f"tools = '{json.dumps(TOOLS)}'")
        lines.append(f"tool_result = '{json.dumps(question.tool.result)}'")
        lines.append(f"tool_call = {_toml(question.tool.name)}")
    return "\n".join(lines)


def validation_file() -> str:
    """The whole file as text."""
    prose = (HERE / "prose.txt").read_text(encoding="utf-8").strip()
    head = f'schema = 1\n\n[sanity]\ntext = """{prose}"""\n'
    return "\n\n".join([head, *map(_entry, validation_questions())]) + "\n"
