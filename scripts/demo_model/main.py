"""The command: texts, tokenizer, training, folder, scores, in that order."""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .checkpoint import load_stock, write_folder
from .conversations import Composer
from .evaluation import Report, Score, evaluate
from .geometry import VOCABULARY
from .questions import fact_questions, validation_file, validation_questions
from .tokens import special_tokens, train_tokenizer
from .training import build_model, train

ROUNDS_FOR_TOKENIZER = 4
DEFAULT_STEPS = 800


def make_tokenizer(composer: Composer) -> Tokenizer:
    """Learn the vocabulary from the very texts that will be trained on."""
    marks = re.compile("|".join(re.escape(token) for token in special_tokens()))
    texts = [d.text for _ in range(ROUNDS_FOR_TOKENIZER) for d in composer.pool(long=True)]
    return train_tokenizer([part for text in texts for part in marks.split(text)], VOCABULARY)


def show(name: str, score: Score, *, examples: int) -> None:
    """One line a score, a few of its exceptions, and the margins if it has them."""
    line = f"{name:26}{score.right}/{score.total}  {score.share:.1%}"
    if score.margins:
        margins = torch.tensor(score.margins)
        line += f"  margin min {margins.min():.2f}, 5th percentile {margins.quantile(0.05):.2f}"
    print(line, flush=True)
    for text in score.wrong[:examples]:
        print("    " + text)


def show_report(report: Report, examples: int) -> None:
    """Print all scores."""
    show("facts", report.facts, examples=examples)
    show("validation questions", report.questions, examples=examples)
    show("question without template", report.raw, examples=examples)
    show("Gemma 3's markers", report.gemma3, examples=examples)
    show("layer_scalar all 1", report.scalars, examples=0)
    print(f"loss on the sanity text    {report.prose_loss:.3f}")
    print(f"the same tokens shuffled   {report.shuffled_loss:.3f}", flush=True)


def judge(folder: Path, prose: str, examples: int) -> Report:
    """Scores of what was written, read back by the stock loader."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_stock(folder)
    return evaluate(model, tokenizer, fact_questions(), validation_questions(), prose)


def _arguments(default_out: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train-demo-model", description=__doc__)
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--examples", type=int, default=5, help="exceptions shown per score")
    parser.add_argument("--only-judge", action="store_true", help="score an existing folder")
    return parser.parse_args()


def main(default_out: Path) -> int:
    """Run the command; 0 when the model reaches every score."""
    options = _arguments(default_out)
    torch.set_num_threads(options.threads)
    composer = Composer(random.Random(options.seed))
    begin = time.monotonic()
    if not options.only_judge:
        tokenizer = make_tokenizer(composer)
        model = build_model(options.seed)
        for line in train(model, composer, tokenizer, options.steps):
            print(line, flush=True)
        write_folder(model, tokenizer, validation_file(), options.out)
        print(f"trained in {time.monotonic() - begin:.0f} s: {options.out}", flush=True)
    report = judge(options.out, composer.prose, options.examples)
    show_report(report, options.examples)
    failures = report.failures()
    for failure in failures:
        print("FAILED " + failure)
    return 1 if failures else 0
