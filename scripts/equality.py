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
    parser.add_argument("--family", choices=FAMILIES, action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # models this small are slower on two
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
