"""Random tiny Gemma 3 and Gemma 4 models against stock transformers, drawn by hypothesis, over tp and strategy.

One JSON line a case in the result file; a case that is refused must be one that does not divide. Started again, it goes
on after the last case of each family.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.equality.cases import FAMILIES, draw_case, run_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="cases a family")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=Path("equality-results.jsonl"))
    parser.add_argument("--bundled", type=Path, help="compile the bundled model at every tp there")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # models this small are slower on two
    if asked.bundled is not None:
        return bundled(asked.bundled)
    deadline = time.monotonic() + asked.minutes * 60
    done = read(asked.results)
    for family in asked.family or FAMILIES:
        finished = sum(line["family"] == family for line in done)
        for number in range(finished, asked.count):
            if time.monotonic() > deadline:
                break
            with tempfile.TemporaryDirectory() as folder:
                line = {
                    "family": family,
                    "number": number,
                    **run_case(draw_case(family, number), Path(folder)),
                }
            with asked.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return totals(read(asked.results))


def bundled(folder: Path) -> int:
    """The bundled model compiled in float32 at tp 1, 2, 4, 8 and both strategies, against stock."""
    from gemma_neuron.demo import demo_folder
    from gemma_neuron.pipeline import (
        CompileRequest,
        compile_port,
        open_port,
        runner_factory,
    )
    from tests.bundled.test_equality import BUCKETS, PROMPTS, TEXTS
    from tests.equality.compare import BAR, worst
    from tests.equality.test_ranks import texts_of
    from tests.stock import stock_logits

    failed, ports = 0, {}
    texts = texts_of(2048, TEXTS)
    want = stock_logits(demo_folder(), texts)
    for tp in (1, 2, 4, 8):
        for strategy in ("replicate-kv", "replicate-global"):
            request = CompileRequest(
                out=folder / f"tp{tp}-{strategy}",
                backend="cpu",
                tp=tp,
                strategy=strategy,
                dtype="float32",
                max_context=160,
                slots=3,
                buckets=BUCKETS,
            )
            request.out.parent.mkdir(parents=True, exist_ok=True)
            plan = ports.get(tp)
            if (
                plan is None or tp == 8
            ):  # up to 4 ranks nothing has to be replicated: one plan, one port
                compile_port(str(demo_folder()), request, None, lambda _: None)
                ports[tp] = request.out
            found = worst(runner_factory(open_port(ports[tp]))(), texts, want, PROMPTS)
            failed += max(found.values()) >= BAR
            shown = ", ".join(f"{phase} {value:.1e}" for phase, value in found.items())
            print(f"tp {tp} {strategy}: {shown} of the largest logit (bar {BAR:.0e})", flush=True)
    return 1 if failed else 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals a family; 1 when any case failed."""
    failed = 0
    for family in FAMILIES:
        mine = [line for line in lines if line["family"] == family]
        equal = [line for line in mine if line["outcome"] == "equal"]
        refused = sum(line["outcome"] == "refused" for line in mine)
        wrong = len(mine) - len(equal) - refused
        failed += wrong
        worst = max((line["worst"] for line in equal), default=0.0)
        placements = sorted({p for line in equal for p in line["placements"]})
        print(
            f"{family}: {len(mine)} cases, {len(equal)} equal (worst {worst:.1e} of the largest logit; "
            f"placements {', '.join(placements)}), {refused} refused, {wrong} wrong"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
