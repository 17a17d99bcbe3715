"""Decode speed of a port at one slot against stock transformers' eager `generate`, in turn, in one run.

Both sides get the same prompt, dtype and threads; prefill is timed apart from decode. Each round runs one side,
then the other, so that a machine whose speed drifts drifts for both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gemma_neuron.backends.base import Runner
from gemma_neuron.backends.decode import decode_one, prefill_prompt
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.pipeline import CompileRequest, compile_port, open_port, runner_factory
from gemma_neuron.render import notice

PROMPT = (
    "The lighthouse keeper wrote down the weather every morning in a green notebook: the wind, "
)
Timed = tuple[float, list[float], list[int]]
"""Prefill seconds, seconds of each decode step, greedy tokens."""


def ours(runner: Runner, ids: list[int], steps: int) -> Timed:
    """Prefill, then `steps` greedy tokens through the compiled graphs."""
    started = time.perf_counter()
    token = int(prefill_prompt(runner, ids).argmax())
    prefill, seconds, tokens = time.perf_counter() - started, [], [token]
    for step in range(steps):
        started = time.perf_counter()
        token = int(decode_one(runner, token, len(ids) + step).argmax())
        seconds.append(time.perf_counter() - started)
        tokens.append(token)
    return prefill, seconds, tokens


def stock(model: Any, ids: list[int], steps: int) -> Timed:
    """Stock `generate` with its own cache, eager; a streamer notes when each token is there."""
    import torch

    class Clock:
        def __init__(self) -> None:
            self.times: list[float] = []
            self.tokens: list[int] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            return None

    clock = Clock()
    tokens = torch.tensor([ids])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            streamer=clock,
        )
    # The streamer is given the prompt first, then one token at a time.
    times = clock.times[1:]
    seconds = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - started, seconds, clock.tokens[len(ids) :]


def load_stock(source: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    return found.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="checkpoint folder (scripts/fetch-gemma3-270m)")
    parser.add_argument("--port", type=Path, default=Path("bench-port"), help="made if not there")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    request = CompileRequest(
        out=asked.port,
        backend="cpu",
        tp=1,
        dtype=asked.dtype,
        max_context=asked.context,
        slots=1,
        buckets=(128,),
        base=True,
    )
    compile_port(str(asked.source), request, None, notice)
    ids = load_chat_assets(asked.source).completion_ids(PROMPT)
    runner, model = runner_factory(open_port(asked.port))(), load_stock(asked.source, asked.dtype)
    ours(runner, ids, 8), stock(model, ids, 8)
    sides: dict[str, list[Timed]] = {"gemma-neuron": [], "transformers": []}
    for _ in range(asked.rounds):
        sides["transformers"].append(stock(model, ids, asked.steps))
        sides["gemma-neuron"].append(ours(runner, ids, asked.steps))
    report(sides, asked.dtype, len(ids))
    return 0


def report(sides: dict[str, list[Timed]], dtype: str, prompt: int) -> None:
    """Both sides, one line each, then the ratio of the medians."""
    speed = {}
    for name, runs in sides.items():
        rates = [len(seconds) / sum(seconds) for _, seconds, _ in runs]
        speed[name] = statistics.median(rates)
        prefill = statistics.median(run[0] for run in runs) * 1e3
        print(
            f"{name:13} {dtype}: decode {speed[name]:.1f} tokens/s (median of {len(runs)} rounds, "
            f"{min(rates):.1f} to {max(rates):.1f}); prefill of {prompt} tokens {prefill:.0f} ms"
        )
    ratio = speed["gemma-neuron"] / speed["transformers"]
    first, second = (runs[0][2] for runs in sides.values())
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    where = "all" if same is None else f"the first {same}"
    print(f"decode ratio {ratio:.2f}; greedy tokens equal: {where} of {len(first)}")
    print(json.dumps({"decode_tokens_per_second": speed, "ratio": ratio}), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
