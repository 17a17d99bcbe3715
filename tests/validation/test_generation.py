"""Level 5: as many prompts at once as the port has slots, each as alone; what its loops say of the port."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemma_neuron.backends.decode import Asked, greedy, greedy_together
from gemma_neuron.chat import Tokenizer
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.bars import read_bars
from gemma_neuron.validation.golden_tensors import GoldenGreedy
from gemma_neuron.validation.levels import generation
from tests.tiny import write_tiny_gemma4
from tests.validation.stock_runner import StockRunner


def test_prompts_in_slots_say_what_each_says_alone(tmp_path: Path) -> None:
    """More prompts than slots; one ends by a stop id, one at once, one at the end of the context."""
    source = write_tiny_gemma4(tmp_path, layers=2, dtype="float32")
    runner = StockRunner(source, slots=2, max_context=40, buckets=(32,))
    ids = [list(range(100, 100 + n)) for n in (9, 3, 33, 1, 20)]
    stop = greedy(runner, ids[0], 4)[3]
    prompts = [
        Asked(ids=ids[0], limit=12, stop_ids=(stop,)),
        Asked(ids=ids[1], limit=1),
        Asked(ids=ids[2], limit=30),
        Asked(ids=ids[3], limit=7),
        Asked(ids=ids[4], limit=5),
    ]
    alone = [greedy(runner, asked.ids, asked.limit, asked.stop_ids) for asked in prompts]
    assert alone[0][-1] == stop and [len(tokens) for tokens in alone[1:]] == [1, 8, 7, 5]
    assert greedy_together(runner, prompts) == alone
    assert greedy_together(runner, []) == []


SHUFFLED = [int(i) for i in np.random.default_rng(0).permutation(np.arange(100, 300))]
SANE = SHUFFLED[:160]
LOOPING = [*SANE[:40], *[310, 311, 312] * 40]


def judged(tmp_path: Path, scope: str, margin: float, looping: int) -> LevelResult:
    """Eight prompts: on the first `looping` the port parts by `margin` logits from the reference, and loops."""
    source = write_tiny_gemma4(tmp_path, layers=2, dtype="float32")
    other = np.array([[a, b] for a, b in zip(SANE, LOOPING, strict=True)], np.int32)
    items = {
        f"q{n}": GoldenGreedy(
            name=f"q{n}",
            prompt=np.array([2, n], np.int32),
            tokens=np.array(SANE, np.int32),
            top_ids=other,
            top_values=np.tile(np.array([9.0, 9.0 - margin], np.float32), (len(SANE), 1)),
        )
        for n in range(8)
    }
    context: Any = SimpleNamespace(
        runner=Scripted([LOOPING if n < looping else SANE for n in range(8)]),
        reference=SimpleNamespace(greedy=items),
        tolerance=SimpleNamespace(margin=0.5),
        bars=read_bars(),
        assets=SimpleNamespace(stop_ids=frozenset({1}), tokenizer=Tokenizer.from_folder(source)),
        scope=scope,
        prompt=lambda name: None,
        by_name={},
        answers={},
        facts={},
    )
    return generation.run(context)


class Scripted:
    """Says a text to each prompt, by the prompt's last token."""

    vocab, slots, max_context, prefill_buckets = 512, 1, 256, (64,)

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts, self._ids, self._start = texts, texts[0], 0

    def prefill(self, tokens: list[int], *, slot: int, start: int) -> Any:
        self._start, self._ids = start + len(tokens), self._texts[tokens[-1]]
        return self._row(0)

    def decode(self, tokens: list[int], positions: list[int], active: list[bool]) -> Any:
        return self._row(positions[0] - self._start + 1)[None]

    def _row(self, step: int) -> Any:
        row = np.zeros(self.vocab, np.float32)
        row[self._ids[step]] = 9.0
        return row


@pytest.mark.parametrize(
    ("scope", "margin", "looping", "status"),
    [
        ("base", 0.1, 0, "pass"),
        (
            "base",
            0.1,
            5,
            "pass",
        ),  # parted within the noise: it might as well have been the reference
        ("base", 0.1, 8, "fail"),  # every output loops: no working base model does that
        ("base", 5.0, 1, "fail"),  # the divergence itself is too large
        ("chat", 0.1, 1, "fail"),  # a chat model does not loop by nature
    ],
)
def test_a_base_model_may_loop_after_a_divergence_within_the_noise(
    tmp_path: Path, scope: str, margin: float, looping: int, status: str
) -> None:
    report = judged(tmp_path, scope, margin, looping)
    assert report.status == status
    assert len(report.detail["degenerate_after_noise"]) == (
        looping if margin < 1 and scope == "base" else 0
    )
