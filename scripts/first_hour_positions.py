"""`python -m scripts.first_hour_positions reference SOURCE FILE` and `… compare PORT FILE`, a process each.

How far a port's bfloat16 logits are from stock's in float32, after prompts of each length and in the decode steps that
follow, as a multiple of how far stock's own bfloat16 is: what rounding does to these weights. Argmax would tell little:
random weights leave the likeliest tokens closer than rounding.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gemma_neuron.backends.decode import decode_one, prefill_prompt
from gemma_neuron.pipeline import open_port, runner_factory

LENGTHS = (1, 511, 512, 513, 1023, 1024, 1025, 2048)
"""Prompt lengths around 512, where a compiler once failed, and around the window of 1,024."""
STEPS = 16
TOKENS = range(300, 500)
"""Ordinary tokens of every vocabulary here."""


def positions() -> list[int]:
    """All whose logits are compared: each prompt's last, and those of the steps after it."""
    return sorted({p for length in LENGTHS for p in range(length - 1, length + STEPS)})


def reference(source: Path, path: Path) -> None:
    """Write `tokens` [n] int64, and `float32` and `bfloat16`: stock's logits at `positions()`, [p, vocab] float32."""
    from tests.stock import stock_logits

    rng = np.random.default_rng(0)
    text = [2, *rng.integers(TOKENS.start, TOKENS.stop, max(LENGTHS) + STEPS).tolist()]
    arrays: dict[str, NDArray[Any]] = {"tokens": np.asarray(text, np.int64)}
    for dtype in ("float32", "bfloat16"):
        (logits,) = stock_logits(source, [text], dtype)
        arrays[dtype] = logits[positions()]
    save_file(arrays, path)


def compare(port: Path, path: Path) -> dict[str, object]:
    """`times_noise`: prompt length → its worst position's distance over that of stock's bfloat16 there; `ms`: median of
    a decode step, in milliseconds."""
    arrays = load_file(path)
    text = arrays["tokens"].tolist()
    row = {position: i for i, position in enumerate(positions())}
    runner = runner_factory(open_port(port))()
    found, spent = {}, []
    for length in LENGTHS:
        got = [prefill_prompt(runner, text[:length])]
        for position in range(length, length + STEPS):
            started = time.perf_counter()
            got.append(decode_one(runner, text[position], position))
            spent.append(time.perf_counter() - started)
        rows = [row[length - 1 + i] for i in range(len(got))]
        noise = _distance(arrays["bfloat16"][rows], arrays["float32"][rows]).max()
        far = _distance(np.stack(got), arrays["float32"][rows]).max()
        found[length] = round(float(far / noise), 2)
    runner.close()
    return {"times_noise": found, "ms": 1000 * sorted(spent)[len(spent) // 2]}


def _distance(got: NDArray[np.float32], want: NDArray[np.float32]) -> NDArray[np.float32]:
    """Root mean square of the difference over that of what is wanted, a row. A row that is not a number is infinitely
    far."""
    scale = np.sqrt((want**2).mean(axis=1))
    far: NDArray[np.float32] = np.sqrt(((got - want) ** 2).mean(axis=1)) / scale
    return np.nan_to_num(far, nan=np.inf)


if __name__ == "__main__":
    what, first, second = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "reference":
        reference(first, second)
    else:
        sys.stdout.write(json.dumps(compare(first, second)) + "\n")
