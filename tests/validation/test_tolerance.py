"""The bars that logits are held against: among the likeliest few, among all, and what a flip may overturn."""

from __future__ import annotations

import numpy as np
import pytest

from gemma_neuron.validation.compare import distances, log_sum_exp
from gemma_neuron.validation.golden_tensors import GoldenText
from gemma_neuron.validation.tolerance import Tolerance, summary

VOCAB, POSITIONS = 1500, 3
TOLERANCE = Tolerance(
    relative=0.05,
    top={5: 0.01, 50: 0.02, 1000: 0.03},
    kl=10.0,
    pearson=0.5,
    margin=0.5,
    source="this test",
)


@pytest.fixture
def text() -> GoldenText:
    """Logits that fall by 0.01 a rank from 20, the same at every position."""
    row = np.linspace(20.0, 5.0, VOCAB, dtype=np.float32)
    values = np.tile(row, (POSITIONS, 1))
    total = np.log(np.exp(values).sum(-1, dtype=np.float64)).astype(np.float32)
    return GoldenText("t", np.arange(POSITIONS, dtype=np.int32), values, None, total, total)


@pytest.mark.parametrize(
    ("rank", "off", "words"),
    [
        (2, 0.18, None),
        (2, 0.22, "among the likeliest 5 (bar 0.01)"),
        (20, 0.38, None),
        (20, 0.42, "among the likeliest 50 (bar 0.02)"),
        (400, 0.58, None),
        (400, 0.62, "among the likeliest 1000 (bar 0.03)"),
        (1400, 0.9, None),
        (1400, 1.1, "of the largest logit off (bar 0.05)"),
    ],
)
def test_each_rank_has_its_bar(text: GoldenText, rank: int, off: float, words: str | None) -> None:
    port = text.values.copy()
    port[1, rank] -= off
    problem = TOLERANCE.problem(distances(text, 0, port), text.largest)
    if words is None:
        assert problem is None
    else:
        assert problem is not None and problem.startswith("position 1: ") and words in problem


@pytest.mark.parametrize(("lead", "fails"), [(0.4, False), (0.6, True)])
def test_a_flip_under_the_noise_is_none(text: GoldenText, lead: float, fails: bool) -> None:
    """The reference leads by `lead`; the port says the second. Nothing else is judged."""
    values = text.values.copy()
    values[:, 0] = values[:, 1] + lead
    own = GoldenText("t", text.ids, values, None, text.logsumexp, text.target_logprob)
    port = values.copy()
    port[2, 0] = values[2, 1] - 0.01
    wide = Tolerance(relative=1.0, top={}, kl=10.0, pearson=0.0, margin=0.5, source="this test")
    found = distances(own, 0, port)
    problem = wide.problem(found, own.largest)
    assert (problem is not None) is fails
    assert summary(found, own.largest)["argmax_agreement"] == pytest.approx(2 / 3, abs=1e-6)
    if fails:
        assert "logits of lead overturned" in str(problem)


def random_text(vocab: int) -> GoldenText:
    rng = np.random.default_rng(5)
    logits = (rng.normal(0, 3, (40, vocab)) + 12).astype(np.float32)
    ids, none = np.arange(40, dtype=np.int32), np.zeros(40, np.float32)
    return GoldenText("t", ids, logits, None, log_sum_exp(logits), none)


def test_rounding_is_no_divergence() -> None:
    """Two float32 runs over a wide vocabulary part by rounding; their KL must lie far below the bar of 1e-6."""
    text = random_text(50_000)
    rounded = np.nextafter(text.values, np.float32(np.inf))
    assert distances(text, 0, rounded).kl.max() < 1e-9


def test_divergence_is_the_textbooks() -> None:
    text = random_text(900)  # all of it is recorded
    moved = text.values + np.random.default_rng(6).normal(0, 0.01, text.values.shape)
    log_p, log_q = (
        x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (text.values.astype(float), moved)
    )
    expected = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    found = distances(text, 0, moved.astype(np.float32)).kl
    np.testing.assert_allclose(found, expected, rtol=1e-3)
