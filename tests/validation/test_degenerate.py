"""The detector finds loops of every period and leaves ordinary output alone."""

from __future__ import annotations

import random

import pytest

from gemma_neuron.validation.degenerate import (
    LONGEST_PERIOD,
    degenerate,
    entropy_bits,
    repeats_needed,
)

PROSE = """The moon goes around the earth, and the earth goes around the sun. It takes one year, or a
little more than three hundred and sixty-five days. Most plants need light and water to grow, and animals
that eat plants get their energy from the sugar in them. When it rains, the water runs down into streams,
the streams run into rivers, and the rivers run into the sea, where the sun warms the water again."""
CODE = '''def total(rows):
    """Sum of the rows."""
    result = 0
    for row in rows:
        if row is None:
            continue
        result += row.value
    return result


def mean(rows):
    """Mean of the rows."""
    return total(rows) / len(rows) if rows else 0.0
'''
LIST = "\n".join(
    f"{i}. {word}" for i, word in enumerate("apple pear plum fig lime kiwi melon date".split())
)
TABLE = "\n".join(
    f"| {name} | {number} | {number * number} |" for number, name in enumerate("abcdefghijklmnop")
)
POEM = """Row, row, row your boat, gently down the stream, merrily, merrily, merrily, merrily, life is but a
dream. Row, row, row your boat, gently down the brook, if you catch a little fish, please let it off the hook."""


def words(text: str) -> list[int]:
    """One id per word or mark: a stand-in for a tokenizer."""
    ids: dict[str, int] = {}
    split = text.replace(",", " ,").replace(".", " .").replace("\n", " \n ").split(" ")
    return [ids.setdefault(word, len(ids)) for word in split if word]


@pytest.mark.parametrize(
    "text", [PROSE, CODE, LIST, TABLE, POEM], ids=["prose", "code", "list", "table", "poem"]
)
def test_ordinary_output_passes(text: str) -> None:
    assert degenerate(words(text)) is None


@pytest.mark.parametrize("lead", [0, 30])
def test_loops_of_every_period_are_found(lead: int) -> None:
    rng = random.Random(7)
    for period in range(1, LONGEST_PERIOD + 1):
        phrase = [rng.randrange(1000, 9000) for _ in range(period)]
        length = period + repeats_needed(period)
        loop = (phrase * (length // period + 1))[:length]
        found = degenerate([*range(lead), *loop])
        assert found is not None and "loop of period" in found, period


def test_a_loop_that_was_left_is_found() -> None:
    assert "holds a loop" in str(degenerate([*([5, 6, 7] * 40), *range(100, 140)]))


def test_collapse_to_a_few_tokens_is_found() -> None:
    rng = random.Random(1)
    assert "collapsed" in str(degenerate([rng.choice([3, 4, 9]) for _ in range(200)]))


def test_short_answers_pass() -> None:
    assert degenerate([]) is None
    assert degenerate([4]) is None
    assert degenerate([4] * 10) is None


@pytest.mark.fault("tok-20-repetition")
@pytest.mark.fault("tok-23-closed-thought-default")
@pytest.mark.fault("attn-14-fp16-g3")
def test_one_token_for_ever_is_found() -> None:
    """`orig-20-w4a16-repeat`: the same id 16 times at the end."""
    assert degenerate([1, 2, 3, *[9] * 16]) is not None


def test_entropy() -> None:
    assert entropy_bits([1, 2, 3, 4]) == pytest.approx(2.0)
    assert entropy_bits([]) == 0.0
