"""N ranks = one rank = stock transformers, for every strategy, prompts over twice the window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eager import EagerRunner, eager_port
from tests.equality.compare import BAR, texts_of, worst
from tests.families import GLOBAL, SLIDING, write_family
from tests.stock import stock_logits
from tests.tiny import write_tiny_gemma3, write_tiny_gemma4

PROMPTS = (37, 24, 5)
"""Prefilled: several chunks and a part-filled bucket, a full one, a part-filled small one."""


@pytest.mark.parametrize("strategy", ["replicate-kv", "replicate-global"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gemma4_equals_stock(tmp_path: Path, tp: int, strategy: str) -> None:
    source = write_tiny_gemma4(
        tmp_path / "source", num_attention_heads=16, num_key_value_heads=8, sliding_window=8
    )
    port = eager_port(source, tmp_path / "port", tp=tp, strategy=strategy)
    texts = texts_of(port.geometry.vocab)
    found = worst(EagerRunner(port), texts, stock_logits(source, texts), PROMPTS)
    assert max(found.values()) < BAR, found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gemma3_equals_stock(tmp_path: Path, tp: int) -> None:
    """Four query heads, one KV head: shared KV heads at tp 2 and 4, replicated attention at 8."""
    source = write_tiny_gemma3(
        tmp_path / "source", num_attention_heads=4, num_key_value_heads=1, sliding_window=8
    )
    port = eager_port(source, tmp_path / "port", tp=tp)
    texts = texts_of(port.geometry.vocab)
    found = worst(EagerRunner(port), texts, stock_logits(source, texts), PROMPTS)
    assert max(found.values()) < BAR, found


@pytest.mark.parametrize("left", [7.0, float("inf"), float("nan")])
def test_stale_state_is_never_seen(tmp_path: Path, left: float) -> None:
    """Whatever an earlier request left in the KV state, the logits are the same: a request starts on zeros."""
    source = write_tiny_gemma4(tmp_path / "source", sliding_window=8)
    port = eager_port(source, tmp_path / "port", tp=2)
    texts = texts_of(port.geometry.vocab)
    runner = EagerRunner(port)
    for state in runner._state.values():
        state.fill_(left)
    found = worst(runner, texts, stock_logits(source, texts), PROMPTS)
    assert max(found.values()) < BAR, found


def test_an_inactive_slot_keeps_its_state(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source", sliding_window=8)
    runner = EagerRunner(eager_port(source, tmp_path / "port", tp=2))
    runner.prefill(list(range(10, 20)), slot=1, start=0)
    before = {name: state.clone() for name, state in runner._state.items()}
    runner.decode([7, 9, 0], [3, 4, 0], [True, False, False])
    for name, state in runner._state.items():
        slot_axis = state.dim() - 4
        kept = before[name].select(slot_axis, 1)
        assert state.select(slot_axis, 1).equal(kept), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", ["E2B", "26B-A4B"])
def test_gemma4_sizes_equal_stock(tmp_path: Path, family: str, tp: int) -> None:
    """Per-layer embeddings, borrowed K/V, double-wide MLP; experts: all against stock."""
    layers = [SLIDING, SLIDING, GLOBAL] * 3
    borrowing = {"num_kv_shared_layers": 4} if family == "E2B" else {}
    source = write_family(
        tmp_path / "source", family, layer_types=layers, sliding_window=8, **borrowing
    )
    port = eager_port(source, tmp_path / "port", tp=tp)
    texts = texts_of(port.geometry.vocab)
    found = worst(EagerRunner(port), texts, stock_logits(source, texts), PROMPTS)
    assert max(found.values()) < BAR, found
