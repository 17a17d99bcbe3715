"""Choosing a token: greedy, cuts, penalties, draws that depend on seed, choice and place alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gemma_neuron.serving.requests import Sampling
from gemma_neuron.serving.sampling import SHORTLIST, choose, token_logprob, uniform

Floats = NDArray[np.float32]
LOGITS: Floats = np.array([0.0, 3.0, 2.0, -1.0, 2.5], dtype=np.float32)


def drawn(sampling: Sampling, logits: Floats = LOGITS, draws: int = 400) -> set[int]:
    return {choose(logits, sampling, place=i) for i in range(draws)}


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id() -> None:
    assert choose(LOGITS, Sampling(), place=0) == 1
    assert choose(np.array([1, 5, 5], dtype=np.float32), Sampling(), place=0) == 1


def test_draws_follow_the_probabilities() -> None:
    found = [choose(LOGITS, Sampling(temperature=1.0, seed=7), place=i) for i in range(4000)]
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.bincount(found, minlength=5) / 4000 == pytest.approx(expected, abs=0.03)


def test_same_seed_choice_and_place_give_the_same_number_and_others_do_not() -> None:
    assert uniform(5, 0, 3) == uniform(5, 0, 3)
    others = {uniform(s, c, p) for s in (5, 6, 2**64 - 1) for c in (0, 1) for p in (3, 4)}
    assert len(others) == 12
    assert all(0.0 <= value < 1.0 for value in others)


def test_cuts() -> None:
    assert drawn(Sampling(temperature=2.0)) == {0, 1, 2, 3, 4}
    assert drawn(Sampling(temperature=2.0, top_k=2)) == {1, 4}
    assert drawn(Sampling(temperature=2.0, top_k=1)) == {1}
    assert drawn(Sampling(temperature=1.0, top_p=0.5)) == {1, 4}  # 0.475 alone is not half
    assert drawn(Sampling(temperature=1.0, top_p=1e-9)) == {1}
    assert drawn(Sampling(temperature=1.0, min_p=0.3)) == {1, 2, 4}


def test_top_p_by_shortlist_equals_top_p_by_sorting_all() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=3 * SHORTLIST) * 4).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=0.7)
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probabilities)
    mass = np.cumsum(probabilities[order]) / probabilities.sum()
    wanted = set(order[: int(np.searchsorted(mass, 0.7)) + 1].tolist())
    assert drawn(sampling, logits, draws=200) <= wanted
    flat = np.zeros(3 * SHORTLIST, dtype=np.float32)  # the shortlist does not hold 0.7 here
    assert len(drawn(sampling, flat, draws=300)) > 250


def test_penalties_and_bias() -> None:
    logits = np.array([1.0, 2.0, -1.0], dtype=np.float32)
    assert choose(logits, Sampling(repetition_penalty=4.0), place=1, prompt=[1]) == 0
    assert choose(logits, Sampling(presence_penalty=1.5), place=1, counts={1: 1}) == 0
    assert choose(logits, Sampling(presence_penalty=0.5), place=1, counts={1: 1}) == 1
    assert choose(logits, Sampling(frequency_penalty=0.4), place=1, counts={1: 3}) == 0
    assert choose(logits, Sampling(presence_penalty=1.5), place=0, prompt=[1]) == 1
    assert choose(logits, Sampling(logit_bias=((2, 100.0),)), place=0) == 2


def test_tok_22_placeholders_are_never_chosen() -> None:
    logits = np.array([0.0, 1.0, 9.0], dtype=np.float32)
    banned = np.array([2])
    assert choose(logits, Sampling(), place=0, banned=banned) == 1
    hot = Sampling(temperature=2.0)
    assert {choose(logits, hot, place=i, banned=banned) for i in range(100)} == {0, 1}
    assert logits[2] == 9.0


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=50),
    st.floats(0.01, 2),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_any_setting_chooses_a_token(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert 0 <= choose(logits, sampling, place=0) < len(values)


def test_logprobs() -> None:
    expected = np.log(np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum())
    found = token_logprob(LOGITS, 2, 3)
    assert found.logprob == pytest.approx(expected[2])
    assert [token for token, _ in found.top] == [1, 4, 2]
    assert [value for _, value in found.top] == pytest.approx(expected[[1, 4, 2]])
    assert token_logprob(LOGITS, 2, 0).top == ()
    assert len(token_logprob(LOGITS, 2, 20).top) == 5
