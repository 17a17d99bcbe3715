"""The detector finds loops of every period and leaves ordinary output alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gemma_neuron.demo import demo_folder
from gemma_neuron.tokenizer import Tokenizer
from gemma_neuron.validation.degenerate import LONGEST_PERIOD, degenerate, entropy_bits
from tests.validation.loops import made_loops, real_generations, real_loops
from tests.validation.ordinary_text import QUICK, pieces

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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_folder())


class Wordless(Tokenizer):
    """Knows no text: every token counts as one with letters."""

    def __init__(self) -> None:
        pass

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return ""


@pytest.mark.parametrize(
    "text", [PROSE, CODE, LIST, TABLE, POEM], ids=["prose", "code", "list", "table", "poem"]
)
def test_ordinary_output_passes(tokenizer: Tokenizer, text: str) -> None:
    assert degenerate(tokenizer.encode(text), tokenizer) is None


def test_text_of_this_machine_passes(tokenizer: Tokenizer) -> None:
    """A part of what `scripts/check-degenerate` measures: below 1 % on text that packages ship."""
    found = {piece: degenerate(piece.ids, tokenizer) for piece in pieces(tokenizer, 60, QUICK)}
    assert len(found) >= 120
    alarms = [f"{piece.source}: {why}" for piece, why in found.items() if why is not None]
    assert len(alarms) < len(found) / 100, alarms


def test_loops_of_every_period_are_found(tokenizer: Tokenizer) -> None:
    for loop in made_loops(tokenizer, tokenizer.encode(PROSE), range(1, LONGEST_PERIOD + 1, 11)):
        assert "loop of period" in str(degenerate(loop.ids, tokenizer)), loop.name


def test_loops_of_a_real_model_are_found() -> None:
    """Gemma 3 270M under greedy decoding, replayed."""
    generations = real_generations()
    assert sum(item.cycle is not None for item in generations) >= 10
    loops = list(real_loops(generations))
    missed = [loop.name for loop in loops if degenerate(loop.ids, Wordless()) is None]
    assert len(missed) < len(loops) / 100, missed


def test_layout_is_measured_in_characters(tokenizer: Tokenizer) -> None:
    """A rule under a heading is no loop; nothing but dashes is, and so are three lines of them."""
    prose = tokenizer.encode(PROSE)
    dash = tokenizer.id_of("-")
    assert dash is not None
    assert degenerate([*prose, *[dash] * 79], tokenizer) is None
    assert degenerate([*prose, *[dash] * 240], tokenizer) is not None
    assert degenerate([dash] * 40, tokenizer) is not None


def test_a_loop_that_was_left_is_found(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode(" moon earth sun") * 60
    assert "holds a loop" in str(degenerate([*words, *tokenizer.encode(PROSE)], tokenizer))


def test_collapse_to_a_few_tokens_is_found(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    few = tokenizer.encode(" moon earth sun")
    ids = [rng.choice(few) for _ in range(200)]
    assert "collapsed" in str(degenerate(ids, tokenizer))


def test_short_answers_pass(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode(" moon")[0]
    assert degenerate([], tokenizer) is None
    assert degenerate([word], tokenizer) is None
    assert degenerate([word] * 10, tokenizer) is None


@pytest.mark.fault("tok-20-repetition")
@pytest.mark.fault("tok-23-closed-thought-default")
@pytest.mark.fault("attn-14-fp16-g3")
@pytest.mark.parametrize("piece", [" moon", "<pad>"])
def test_one_token_for_ever_is_found(tokenizer: Tokenizer, piece: str) -> None:
    """`orig-20-w4a16-repeat`: the same id 16 times at the end."""
    word = tokenizer.encode(piece)[0]
    assert degenerate([*tokenizer.encode("The sun is"), *[word] * 16], tokenizer) is not None


def test_entropy() -> None:
    assert entropy_bits([1, 2, 3, 4]) == pytest.approx(2.0)
    assert entropy_bits([]) == 0.0
