"""`python -m tests.neuron.against_stock SOURCE PORT`: a port's logits against stock transformers, as one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gemma_neuron.pipeline import open_port, runner_factory
from tests.equality.compare import BAR, worst
from tests.equality.test_ranks import texts_of
from tests.stock import stock_logits

TEXTS, PROMPTS = (40, 24, 9), (30, 24, 5)


def main(source: Path, port: Path) -> None:
    runner = runner_factory(open_port(port))()
    texts = texts_of(runner.vocab, TEXTS)
    found = worst(runner, texts, stock_logits(source, texts), PROMPTS)
    runner.close()
    sys.stdout.write(json.dumps({"worst": found, "bar": BAR}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
