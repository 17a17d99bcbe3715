"""Text given out in pieces, joined, is the text of the whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from gemma_neuron.chat import StopStrings, StreamDecoder, Tokenizer
from tests.serving.server import VOCAB, write_source


@cache
def gemma() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(write_source(Path(folder)))


@cache
def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, bos_id=0)


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    return [*(decoder.feed([i]) for i in ids), decoder.finish()]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_any_ids_give_the_text_of_the_whole(ids: list[int], skip: bool) -> None:
    pieces = streamed(gemma(), ids, skip_special=skip)
    assert "".join(pieces) == gemma().decode(ids, skip_special=skip)


BYTES = st.sampled_from([0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF])


@given(
    st.lists(
        st.one_of(BYTES.map(lambda b: 108 + b), st.sampled_from([2, 107, 364, 400])), max_size=24
    )
)
def test_byte_runs_good_and_bad(ids: list[int]) -> None:
    pieces = streamed(gemma(), ids)
    assert "".join(pieces) == gemma().decode(ids)


@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces = streamed(gemma(), gemma().encode(text))
    expected = gemma().decode(gemma().encode(text))
    assert "".join(pieces) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_byte_level_vocabularies(ids: list[int]) -> None:
    assert "".join(streamed(byte_level(), ids)) == byte_level().decode(ids)


def test_plain_text_is_not_held_back() -> None:
    ids = gemma().encode("the end of it")
    assert streamed(gemma(), ids)[:-1] == [gemma().decode([i]) for i in ids]


ALPHABET = "ab\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def reference_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, one character at a time over the whole text."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=10), STOPS)
def test_stop_strings_cut_alike_however_the_text_comes(parts: list[str], stops: list[str]) -> None:
    cutter = StopStrings(stops)
    given_out = [cutter.feed(part) for part in parts]
    if cutter.found is None:
        given_out.append(cutter.finish())
    assert ("".join(given_out), cutter.found) == reference_cut("".join(parts), stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    cutter = StopStrings(["END"])
    assert [cutter.feed(t) for t in ("aE", "N", "x", "EN", "D", "more")] == [
        "a",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert cutter.found == "END"
