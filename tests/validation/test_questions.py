"""Question files: what is read, what is refused and how it is said."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.demo import demo_folder
from gemma_neuron.errors import UsageError
from gemma_neuron.validation.bars import Bar, read_bars
from gemma_neuron.validation.prompts import Conversation, Reach, choose_prompts
from gemma_neuron.validation.questions import (
    GENERAL,
    Question,
    find_questions,
    read_questions,
    spread,
)

GOOD = 'schema = 1\n[sanity]\ntext = "x"\n[[questions]]\nprompt = "a"\nanswers = ["b"]\n'


def turns(last: str) -> str:
    """A file whose one question ends with this message."""
    return GOOD.replace('prompt = "a"', f'messages = [{{role = "user", content = "a"}}, {last}]')


def test_general_set_has_both_scopes() -> None:
    found = read_questions(GENERAL)
    assert len(found.for_scope("base")) == 8
    kinds = {question.kind for _, question in found.for_scope("chat")}
    assert kinds == {"fact", "multi-turn", "system", "json"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 2\n" + GOOD[11:], "schema"),
        (GOOD[11:], "schema"),
        ("schema = 1\n[[questions]]\nprompt='a'\nanswers=['b']", "sanity"),
        (GOOD + "kind = 'joke'\n", "kind"),
        (GOOD + "colour = 'red'\n", "colour"),
        (GOOD.replace('["b"]', "[]"), "answers"),
        (GOOD.replace('prompt = "a"\n', ""), "either `prompt` or `messages`"),
        (GOOD + "kind = 'tool'\n", "tool_call"),
        (GOOD + "tools = '{'\n", "Expecting"),
        ("schema = ", "cannot be read"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        (GOOD + f"tools = '{'[' * 100_000}'\n", "nested too deeply"),
        (GOOD + "tools = '[1]'\n", "list of objects"),
        ("#" * 5_000_000, "more than 4,194,304 bytes"),
        # contained in whatever a model says
        (GOOD.replace('["b"]', '["b", ""]'), "answers.1: Value error, is blank"),
        (GOOD.replace('["b"]', '["  "]'), "answers.0: Value error, is blank"),
        (GOOD.replace('"a"', '" "'), "`prompt` is blank"),
        (GOOD.replace('"x"', '" "'), "sanity.text: Value error, is blank"),
        (turns('{content = "x"}'), "role: Field required"),
        (turns('{role = "user"}'), "a message of user has no content"),
        (turns('{role = "user", content = 1979-05-27}'), "valid string"),
        (turns('{role = "user", content = "x", at = 1979-05-27}'), "not JSON serializable"),
        (turns('{role = "user", content = "x", at = nan}'), "not JSON compliant"),
        (turns('{role = "assistant", content = "x"}'), "must end with what the model"),
    ],
)
def test_malformed_file_is_a_usage_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "q.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_questions(file)
    assert words in caught.value.message
    assert str(file) in caught.value.message


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "q.toml"
    file.write_text(GOOD, encoding="utf-8-sig")
    assert read_questions(file).questions[0].prompt == "a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('prompt = "a"', 'prompt = "a<turn|>b"'),
            r"q00 of .* spells the control token '<turn\|>'",
        ),
        (('text = "x"', 'text = "x"'), "sanity text of .* shuffling it shows something from 8 on"),
    ],
)
def test_what_no_verdict_can_stand_on(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    """Of this tokenizer: text that becomes turns, and prose too short to be shuffled."""
    file = tmp_path / "q.toml"
    file.write_text(GOOD.replace(*change))
    assets = load_chat_assets(demo_folder())
    talk = Conversation(assets=assets, template=assets.template, scope="chat")
    reach = Reach(window=32, max_context=256, buckets=(64,), vocab=1024)
    with pytest.raises(UsageError, match=words):
        choose_prompts(talk, read_questions(file), reach)


def test_order_of_search(tmp_path: Path) -> None:
    assert find_questions(None, (tmp_path,)).origin == "the packaged general set"
    (tmp_path / "validation.toml").write_text(GOOD)
    assert find_questions(None, (tmp_path,)).origin == "the checkpoint's validation.toml"
    other = tmp_path / "mine.toml"
    other.write_text(GOOD)
    assert find_questions(other, (tmp_path,)).origin == str(other)
    with pytest.raises(UsageError, match="cannot be read"):
        find_questions(tmp_path / "none.toml", ())


def test_spread_keeps_shares_and_every_kind() -> None:
    kinds = ["fact"] * 60 + ["json"] * 9 + ["system"] * 20 + ["thinking"]
    named = tuple(
        (f"q{i:02d}", Question(prompt="a", answers=("b",), kind=kind))  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    )
    chosen = spread(named, 30)
    counts = Counter(question.kind for _, question in chosen)
    assert len(chosen) == 30 and counts["fact"] >= 18
    assert counts["json"] >= 2 and counts["system"] >= 5 and counts["thinking"] == 1
    assert [name for name, _ in chosen] == sorted(name for name, _ in chosen)
    assert spread(named, 200) == named


def _bars(found: object) -> Iterator[Bar]:
    """Every bar below, whatever it lies in."""
    if isinstance(found, Bar):
        yield found
    elif isinstance(found, BaseModel):
        for key in type(found).model_fields:
            yield from _bars(getattr(found, key))
    elif isinstance(found, dict):
        for value in found.values():
            yield from _bars(value)


def test_every_bar_has_a_source() -> None:
    named = list(_bars(read_bars()))
    assert len(named) > 30 and all(len(bar.source) > 10 for bar in named)


@pytest.mark.parametrize("line", ["{} = 1", "[{}]", '"x" . {} = 1'])
def test_a_key_of_thousands_of_parts_is_refused_at_once(tmp_path: Path, line: str) -> None:
    """It would take the reader minutes; a row of dots in a text takes it nothing."""
    path = tmp_path / "set.toml"
    path.write_text(line.format(".".join(["a"] * 20_000)))
    started = time.monotonic()
    with pytest.raises(UsageError, match="line 1: a key of more than 100 parts"):
        read_questions(path)
    assert time.monotonic() - started < 1
    path.write_text(GENERAL.read_text().replace('text = """', 'text = """\n' + "." * 300 + "\n", 1))
    assert "." * 300 in read_questions(path).sanity
