"""Greedy tokens of ports of a real checkpoint against stock transformers', prompt by prompt.

float32: every token must be equal. bfloat16: where the two part, the stock logits of both tokens and their margin are
printed; a margin above the noise of the dtype would be a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gemma_neuron.backends.decode import greedy
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.pipeline import CompileRequest, compile_port, open_port, runner_factory
from gemma_neuron.render import notice

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "def fibonacci(n):\n",
    "In the year 1969, two people walked on",
    "Dear Sir or Madam,\n\nI am writing to",
    "The most important thing about bread is",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="checkpoint folder (scripts/fetch-gemma3-270m)")
    parser.add_argument(
        "--ports", type=Path, default=Path("check-ports"), help="ports are made there"
    )
    parser.add_argument("--tp", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    assets = load_chat_assets(asked.source)
    prompts = [assets.completion_ids(text) for text in PROMPTS]
    failed = 0
    for dtype in asked.dtype or ("float32", "bfloat16"):
        model = load_stock(asked.source, dtype)
        want = [stock_greedy(model, ids, asked.tokens) for ids in prompts]
        for tp in asked.tp or (1, 8):
            out = asked.ports / f"{dtype}-tp{tp}"
            out.parent.mkdir(parents=True, exist_ok=True)
            got = port_greedy(asked.source, out, tp, dtype, prompts, asked.tokens)
            parted = [
                compare(*row, model, assets)
                for row in zip(PROMPTS, prompts, want, got, strict=True)
            ]
            equal = sum(row is None for row in parted)
            print(
                f"{dtype} tp {tp}: {equal} of {len(PROMPTS)} prompts equal over {asked.tokens} tokens"
            )
            for row in filter(None, parted):
                print("  " + json.dumps(row))
            failed += dtype == "float32" and equal < len(PROMPTS)
    return 1 if failed else 0


def load_stock(source: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()


def stock_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Stock `generate`, greedy, stop ids ignored so that all have `count` tokens."""
    import torch

    tokens = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
        )
    return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def port_greedy(
    source: Path, out: Path, tp: int, dtype: str, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """The same prompts through a compiled port, one after another."""
    request = CompileRequest(
        out=out,
        backend="cpu",
        tp=tp,
        dtype=dtype,
        max_context=1024,
        slots=1,
        buckets=(128,),
        base=True,
    )
    compile_port(str(source), request, None, notice)
    runner = runner_factory(open_port(out))()
    found = [greedy(runner, ids, count) for ids in prompts]
    runner.close()
    return found


def compare(
    text: str, ids: list[int], want: list[int], got: list[int], model: Any, assets: Any
) -> dict[str, Any] | None:
    """Where the two part, with the stock logits' margin there; None: nowhere."""
    import torch

    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
    if at is None:
        return None
    with torch.inference_mode():
        logits = model(torch.tensor([ids + want[:at]])).logits[0, -1].float()
    return {
        "prompt": text,
        "position": at,
        "stock": assets.tokenizer.piece_of(want[at]),
        "port": assets.tokenizer.piece_of(got[at]),
        "margin": round(float(logits[want[at]] - logits[got[at]]), 4),
        "largest_logit": round(float(logits.abs().max()), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
