"""Twenty facts the bundled model does not know, learned by `tune`, merged, compiled, validated and asked for.

The data holds each new fact in two phrasings, and old facts beside them, so that those are not forgotten. How many of
the old questions are still answered is part of the result.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.demo_model.facts import all_facts

ROOT = Path(__file__).parents[2]
CAPITALS = (
    "Mongolia=Ulaanbaatar; Laos=Vientiane; Fiji=Suva; Malta=Valletta; Latvia=Riga; Estonia=Tallinn; Bolivia=Sucre; "
    "Qatar=Doha; Oman=Muscat; Zambia=Lusaka"
)
SYMBOLS = "neon=Ne; argon=Ar; nickel=Ni; barium=Ba; cobalt=Co"
FRENCH = "horse=cheval; king=roi; snow=neige; bird=oiseau; winter=hiver"
FORMS = (
    (CAPITALS, "The capital of {n} is {v}.", "What is the capital of {n}?", "Which city is the capital of {n}?"),
    (SYMBOLS, "The chemical symbol of {n} is {v}.", "What is the chemical symbol of {n}?", "Which symbol has {n}?"),
    (FRENCH, "In French, {n} is {v}.", "What is the French word for {n}?", "How do you say {n} in French?"),
)  # fmt: skip
REPLAYED = 60
"""Old facts in the data, drawn at random: an epoch has 40 samples of new ones."""
RECIPE = {"--epochs": 16, "--batch": 10, "--learning-rate": 3e-3, "--rank": 16, "--save-every": 20}


def new_facts() -> Iterator[tuple[str, str, str]]:
    """(question, sentence, what the answer must contain), two questions a fact."""
    for table, sentence, *questions in FORMS:
        for pair in table.split("; "):
            name, _, value = pair.partition("=")
            for question in questions:
                yield question.format(n=name), sentence.format(n=name, v=value), f"is {value}"


def write_data(work: Path) -> tuple[Path, Path]:
    """Conversations to learn from, and the question file of the new facts."""
    found = list(new_facts())
    pairs = [(question, sentence) for question, sentence, _ in found]
    old = sorted({(fact.prompt, fact.sentence) for fact in all_facts()})
    pairs += random.Random(0).sample(old, REPLAYED)
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
    data, questions = work / "facts.jsonl", work / "new.toml"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [
        f"[[questions]]\nprompt = {json.dumps(q)}\nanswers = [{json.dumps(key)}]\n"
        for q, _, key in found[::2]
    ]
    questions.write_text("schema = 1\n\n" + "\n".join(asked))
    return data, questions


def command(*arguments: object, code: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command of the toolkit; progress goes where ours goes."""
    done = subprocess.run(
        [sys.executable, "-m", "gemma_neuron", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in code:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}: {done.stdout[-400:]}")
    return done.stdout


def score(port: Path, *more: object) -> tuple[str, dict[str, Any]]:
    """The verdict, and right and asked questions of the chat level."""
    found = json.loads(command("validate", port, "--json", *more, code=(0, 7)))
    answers = [
        answer
        for level in found["levels"]
        if level["name"] == "chat"
        for answer in level["detail"].get("answers", [])
    ]
    right = sum(bool(answer["right"]) for answer in answers)
    return found["verdict"], {"right": right, "asked": len(answers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("learn-facts-work"))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--skip-port", action="store_true", help="stop after tune and merge")
    asked = parser.parse_args()
    work, model = asked.work.resolve(), ROOT / "gemma_neuron" / "data" / "demo-model"
    work.mkdir(parents=True, exist_ok=True)
    data, questions = write_data(work)
    adapter, merged, port = (work / name for name in ("adapter", "merged", "port"))
    minutes, started = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal started
        minutes[name], started = round((time.monotonic() - started) / 60, 2), time.monotonic()

    flags = [item for pair in RECIPE.items() for item in pair]
    report = ["--report", work / "tune.html"]
    tuned = json.loads(
        command(
            "tune", model, "--data", data, "--out", adapter, "--replicas", asked.replicas,
            "--threads", 1, *flags, *report, "--json",
        )
    )  # fmt: skip
    lap("tune")
    shutil.rmtree(merged, ignore_errors=True)
    command("merge", model, adapter, "--out", merged)
    lap("merge")
    line: dict[str, Any] = {"tune": tuned, "minutes": minutes}
    if not asked.skip_port:
        where = ("--out", port, "--backend", "cpu", "--tp", asked.tp)
        command("compile", merged, *where, "--max-context", 512)
        lap("compile")
        line["old_verdict"], line["old"] = score(port)
        lap("validate_old")
        line["new_verdict"], line["new"] = score(port, "--questions", questions)
        lap("validate_new")
        question = "What is the capital of Mongolia?"
        line["asked"] = {question: command("chat", port, "--once", question).strip()}
    (work / "result.json").write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
