"""The bundled model at every tp and strategy against stock transformers, float32, every position.

Uncompiled, so that all eight take seconds each; `scripts/equality --bundled` compiles them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_neuron.demo import demo_folder
from tests.eager import EagerRunner, eager_port
from tests.equality.compare import BAR, texts_of, worst
from tests.stock import stock_logits

TEXTS, PROMPTS = (150, 64, 40), (100, 64, 17)
"""Over four windows of 32; one prompt fills its bucket, two do not; decode crosses the window's edge."""
BUCKETS = (16, 64)


@pytest.mark.parametrize("strategy", ["replicate-kv", "replicate-global"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_bundled_model_equals_stock(tmp_path: Path, tp: int, strategy: str) -> None:
    port = eager_port(
        demo_folder(), tmp_path, tp=tp, strategy=strategy, max_context=160, buckets=BUCKETS
    )
    texts = texts_of(port.geometry.vocab, TEXTS)
    found = worst(EagerRunner(port), texts, stock_logits(demo_folder(), texts), PROMPTS)
    assert max(found.values()) < BAR, found
