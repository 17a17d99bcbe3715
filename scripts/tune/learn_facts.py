"""Twenty facts the bundled model does not know, learned by `tune`, merged, compiled, validated and asked for.

The data holds each new fact in two phrasings, and old facts beside them, so that those are not forgotten. Old and new
questions are put to the port of the model as it was and to that of the merged one, the new ones to `serve-local` too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.demo_model.facts import all_facts
from tests.neuron.flow import asked, serving

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "gemma_neuron" / "data" / "demo-model"
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

QUESTION_LEVELS = "0-2,5-6"
"""prompt, weights, reference, generation, chat"""


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
    text = tomllib.loads((MODEL / "validation.toml").read_text())["sanity"]["text"]
    questions.write_text(
        "\n".join(["schema = 1", "", "[sanity]", f"text = {json.dumps(text)}", "", *asked])
    )
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


def score(port: Path, *more: object) -> dict[str, Any]:
    """Verdict, right and asked questions of the chat level."""
    report = json.loads(command("validate", port, "--json", *more, code=(0, 7)))
    (chat,) = (level for level in report["levels"] if level["name"] == "chat")
    right = [bool(answer["right"]) for answer in chat["detail"]["answers"]]
    return {"verdict": report["verdict"], "right": sum(right), "asked": len(right)}


def served(port: Path) -> dict[str, Any]:
    """The new facts asked of `serve-local`, which starts only what `validate` found to work."""
    with serving(dict(os.environ), port) as ready:
        answers = {
            question: ask(ready["url"], question) for question, _, _ in list(new_facts())[::2]
        }
    keys = {question: key for question, _, key in new_facts()}
    wrong = {q: answer for q, answer in answers.items() if keys[q] not in answer}
    return {"right": len(answers) - len(wrong), "asked": len(answers), "wrong": wrong}


def ask(url: str, question: str) -> str:
    """The answer of a server's chat to one question; the first waits until the weights are there."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "model": "port"}
    answer: str = asked(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return answer


class Learning:
    """The whole way in one folder; `minutes`: what each part took."""

    def __init__(self, work: Path, tp: int, replicas: int) -> None:
        self.work, self.tp, self.replicas = work, tp, replicas
        self.data, self.questions = write_data(work)
        self.minutes: dict[str, float] = {}

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.minutes[name] = round((time.monotonic() - started) / 60, 2)

    def learn(self) -> dict[str, Any]:
        """Tune and merge."""
        adapter, merged = self.work / "adapter", self.work / "merged"
        flags = [item for pair in RECIPE.items() for item in pair]
        with self.lap("tune"):
            tuned: dict[str, Any] = json.loads(
                command(
                    "tune", MODEL, "--data", self.data, "--out", adapter, "--replicas", self.replicas,
                    "--threads", 1, *flags, "--report", self.work / "tune.html", "--json",
                )
            )  # fmt: skip
        shutil.rmtree(merged, ignore_errors=True)
        with self.lap("merge"):
            command("merge", MODEL, adapter, "--out", merged)
        return tuned

    def ported(self, source: Path, name: str) -> tuple[Path, dict[str, Any]]:
        """A port of `source` and what it scores. The new facts first: serving asks for the last verdict."""
        port = self.work / f"port-{name}"
        with self.lap(f"compile {name}"):
            where = ("--out", port, "--backend", "cpu", "--tp", self.tp)
            command("compile", source, *where, "--max-context", 512, "--buckets", 128)
        return port, self.scored(port, source, name)

    def scored(self, port: Path, source: Path, name: str) -> dict[str, Any]:
        """Scores of the new facts, by the levels that put questions, then of the model's own, by all levels."""
        of = ("--checkpoint", source)  # a port made elsewhere names a folder that is not here
        with self.lap(f"validate {name}"):
            new = score(port, *of, "--questions", self.questions, "--levels", QUESTION_LEVELS)
            return {"new": new, "old": score(port, *of)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("learn-facts-work"))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--skip-port", action="store_true", help="stop after tune and merge")
    parser.add_argument(
        "--before", type=Path, help="a port of the bundled model, else one is compiled"
    )
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    learning = Learning(work, given.tp, given.replicas)
    line: dict[str, Any] = {"tune": learning.learn(), "minutes": learning.minutes}
    good = True
    if not given.skip_port:
        if given.before is None:
            _, line["before"] = learning.ported(MODEL, "before")
        else:
            line["before"] = learning.scored(given.before.resolve(), MODEL, "before")
        port, line["after"] = learning.ported(work / "merged", "after")
        with learning.lap("serve"):
            line["served"] = served(port)
        good = line["served"]["right"] == line["served"]["asked"] == line["after"]["new"]["right"]
    line["load"] = round(os.getloadavg()[0], 1)
    (work / "result.json").write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
