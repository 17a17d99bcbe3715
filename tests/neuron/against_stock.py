"""`python -m tests.neuron.against_stock PORT STOCK`: a port's logits against stock transformers', as one JSON line.

STOCK is a file by `write_stock`: the process that drives the cores needs no transformers, and one file serves every
port of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from gemma_neuron.pipeline import open_port, runner_factory
from tests.equality.compare import BAR, texts_of, worst

LENGTHS, PROMPTS = (40, 24, 9), (30, 24, 5)
"""Tokens of each text, and how many of them are prefilled: several windows and part-filled buckets."""


def write_stock(source: Path, path: Path) -> Path:
    """Texts of random tokens and stock's logits of them, [n, vocab] float32 each."""
    from tests.stock import stock_logits

    vocab = json.loads((source / "config.json").read_text())["text_config"]["vocab_size"]
    texts = texts_of(vocab, LENGTHS)
    logits = stock_logits(source, texts)
    pairs = enumerate(zip(texts, logits, strict=True))
    arrays = {f"{kind}{i}": x for i, pair in pairs for kind, x in zip("tl", pair, strict=True)}
    save_file({name: np.asarray(x) for name, x in arrays.items()}, path)
    return path


def main(port: Path, stock: Path) -> None:
    arrays = load_file(stock)
    count = range(len(LENGTHS))
    texts, logits = ([arrays[f"{kind}{i}"] for i in count] for kind in "tl")
    runner = runner_factory(open_port(port))()
    found = worst(runner, [text.tolist() for text in texts], logits, PROMPTS)
    runner.close()
    sys.stdout.write(json.dumps({"worst": found, "bar": BAR}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
