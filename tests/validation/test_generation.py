"""Level 5 asks as many prompts at once as the port has slots; each must get what it would get alone."""

from __future__ import annotations

from pathlib import Path

from gemma_neuron.backends.decode import Asked, greedy, greedy_together
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
