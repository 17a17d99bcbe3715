"""False alarms of the degenerate-output detector on ordinary text, and its recall on loops.

Ordinary text is what Debian and Python packages put on this machine (tests/validation/ordinary_text.py); loops are
made, of every period, and real (tests/validation/loops.py). One JSON line a case in the result file; started again, it
goes on with the cases that are not there. Totals come from the file. 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.demo import demo_folder
from gemma_neuron.tokenizer import Tokenizer
from gemma_neuron.validation.degenerate import LONGEST_PERIOD, degenerate
from scripts.result_file import read_results
from tests.validation.loops import (
    PROMPTS,
    REAL,
    layout_loops,
    made_loops,
    real_generations,
    real_loops,
)
from tests.validation.ordinary_text import KINDS, pieces

LEAST_TEXTS, FALSE_ALARMS, RECALL = 500, 0.01, 0.99
GENERATED = 320
"""Tokens of a real continuation: three rounds of a loop of 80, where most of 270M's begin within the first fifty."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="pieces of text a kind; prompts")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=Path("check-degenerate-results.jsonl"))
    parser.add_argument("--tokenizer", type=Path, help="checkpoint folder; default: the bundled")
    parser.add_argument("--texts", type=Path, action="append", default=[])
    parser.add_argument("--generate", type=Path, help="Gemma 3 270M (scripts/fetch-gemma3-270m)")
    asked = parser.parse_args()
    if asked.generate is not None:
        return generate(asked.generate, asked.count)
    tokenizer = Tokenizer.from_folder(asked.tokenizer or demo_folder())
    name = (asked.tokenizer or demo_folder()).name
    deadline = time.monotonic() + asked.minutes * 60
    done = {line["case"] for line in read_results(asked.results)}
    with asked.results.open("a") as file:
        for case in cases(tokenizer, name, asked.count, asked.texts):
            if time.monotonic() > deadline:
                break
            if case.name in done:
                continue
            found = degenerate(case.ids, case.tokenizer)
            file.write(json.dumps(case.line(found)) + "\n")
    return totals(read_results(asked.results))


@dataclass(frozen=True, slots=True)
class Case:
    part: str
    kind: str
    name: str
    source: str
    ids: tuple[int, ...]
    tokenizer: Tokenizer

    def line(self, found: str | None) -> dict[str, Any]:
        return {
            "case": self.name,
            "part": self.part,
            "kind": self.kind,
            "source": self.source,
            "tokens": len(self.ids),
            "found": found,
        }


def cases(tokenizer: Tokenizer, name: str, count: int, texts: list[Path]) -> Iterator[Case]:
    """Every case in its order. Real loops are tokens of 270M: which tokenizer reads them decides layout only."""
    good: list[int] = []
    for number, piece in enumerate(pieces(tokenizer, count, KINDS, more=texts)):
        if len(good) < 2000 and piece.kind == "documentation":
            good += piece.ids
        yield Case("text", piece.kind, f"{name} text {number}", piece.source, piece.ids, tokenizer)
    for loop in made_loops(tokenizer, good, range(1, LONGEST_PERIOD + 1)):
        yield Case("made", "letters", f"{name} {loop.name}", "", loop.ids, tokenizer)
    for loop in layout_loops(tokenizer, good):
        yield Case("made", "layout", f"{name} {loop.name}", "", loop.ids, tokenizer)
    for loop in real_loops(real_generations()):
        yield Case("real", "270M", f"{name} {loop.name}", "", loop.ids, tokenizer)


def totals(lines: list[dict[str, Any]]) -> int:
    """Print totals from the result file; 1 when a bar is missed."""
    texts = [line for line in lines if line["part"] == "text"]
    alarms = [line for line in texts if line["found"]]
    kinds, files = Counter(line["kind"] for line in texts), {line["source"] for line in texts}
    for kind, number in kinds.items():
        false = sum(line["kind"] == kind for line in alarms)
        print(f"{kind}: {false} false alarms on {number} pieces")
    for line in alarms:
        print(f"  {line['source']}, {line['tokens']} tokens: {line['found']}")
    share = len(alarms) / max(len(texts), 1)
    print(
        f"ordinary text: {len(alarms)} of {len(texts)} pieces of {len(files)} files alarmed, {share:.2%} (bar < 1 %)"
    )
    failed = len(texts) < LEAST_TEXTS or share >= FALSE_ALARMS
    for part in ("made", "real"):
        loops = [line for line in lines if line["part"] == part]
        found = sum(line["found"] is not None for line in loops)
        for line in [line for line in loops if line["found"] is None][:10]:
            print(f"  missed: {line['case']}, {line['tokens']} tokens")
        recall = found / max(len(loops), 1)
        print(f"loops, {part}: {found} of {len(loops)} found, {recall:.2%} (bar > 99 %)")
        failed |= recall <= RECALL
    return int(failed)


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    limit: int
    stop_ids: tuple[int, ...]


def generate(folder: Path, count: int) -> int:
    """Greedy continuations of the first `count` of `PROMPTS` by stock transformers, written over the file."""
    from gemma_neuron.validation.reference import open_reference

    assets = load_chat_assets(folder)
    texts = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    stops = tuple(sorted(assets.stop_ids))
    asked = [Prompt(tuple(assets.completion_ids(text)), GENERATED, stops) for text in texts]
    reference = open_reference(folder, "float32")
    found = reference.greedy(asked, 2, lambda line: print(f"\r{line}", end="", file=sys.stderr))
    with REAL.open("w", encoding="utf-8") as file:
        for text, steps in zip(texts, found, strict=True):
            ids = [step.token for step in steps if step.token not in stops]
            file.write(json.dumps({"prompt": text, "ids": ids}, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
