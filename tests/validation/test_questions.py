"""Question files: what is read, what is refused and how it is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from gemma_neuron.errors import UsageError
from gemma_neuron.validation.bars import Bar, read_bars
from gemma_neuron.validation.questions import (
    GENERAL,
    Question,
    find_questions,
    read_questions,
    spread,
)

GOOD = 'schema = 1\n[sanity]\ntext = "x"\n[[questions]]\nprompt = "a"\nanswers = ["b"]\n'


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
    ],
)
def test_malformed_file_is_a_usage_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "q.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_questions(file)
    assert words in caught.value.message
    assert str(file) in caught.value.message


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
