"""A golden of one prompt, made within a limit of memory, and the peak of anonymous memory it took.

Prints one JSON line; exits 1 when the peak is over the limit or the logits are not the whole model's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron import settings
from gemma_neuron.validation.golden import GoldenIdentity
from gemma_neuron.validation.golden_tensors import GoldenText
from gemma_neuron.validation.make import make_golden
from gemma_neuron.validation.peak import AnonymousPeak
from gemma_neuron.validation.prompts import GoldenPrompts, TeacherText

SEED = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", default="4GiB")
    parser.add_argument("--whole", action="store_true", help="compare with stock's whole model")
    asked = parser.parse_args()
    limit = settings.size(asked.limit, "--limit")
    assert limit is not None
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, AnonymousPeak() as peak:
        text = golden_text(asked.source, Path(folder), asked.tokens, asked.dtype, limit)
    line: dict[str, object] = {
        "source": str(asked.source),
        "dtype": asked.dtype,
        "tokens": asked.tokens,
        "peak_anonymous_bytes": peak.bytes,
        "limit_bytes": limit,
        "seconds": round(time.monotonic() - started, 1),
    }
    equal = True
    if asked.whole:
        from tests.stock import stock_logits

        (whole,) = stock_logits(asked.source, [text.ids.tolist()], asked.dtype)
        off = float(np.abs(whole - text.values).max() / np.abs(whole).max())
        equal = off <= 1e-6  # of the largest logit: products of other shapes may round otherwise
        line |= {"bitwise": bool(np.array_equal(whole, text.values)), "max_relative": off}
    print(json.dumps(line), flush=True)
    return 0 if equal and peak.bytes < limit else 1


def golden_text(source: Path, folder: Path, tokens: int, dtype: str, limit: int) -> GoldenText:
    """The golden's one text: `tokens` random ids, the same each time."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocab = int((config.get("text_config") or config)["vocab_size"])
    ids = tuple(np.random.default_rng(SEED).integers(3, vocab, tokens).tolist())
    prompts = GoldenPrompts(texts=(TeacherText(name="prompt", ids=ids),), greedy=(), sanity=ids)
    identity = GoldenIdentity(
        checkpoint_digest="",
        template_sha256="",
        prompts_digest=prompts.digest,
        dtype=dtype,
        noise_dtype=None,
        files={},
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    out = folder / "golden.safetensors"
    made = make_golden(source, prompts, identity, out, memory=limit, progress=say)
    return made.texts["prompt"]


if __name__ == "__main__":
    sys.exit(main())
