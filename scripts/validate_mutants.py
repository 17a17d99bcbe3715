"""Mutation score of the validator: single faults in a port, each judged by every level.

The port is cut and committed as `shard` does it and its graphs run uncompiled: a fault in a graph changes one line of
the model code for one case. Faults in weights and prompts run on the graphs of `--port`, when one is given. Mutants are
asked fewer questions than the model's set has, which can only hide a fault. `--clean N` runs N settings (degree,
strategy, dtype, buckets, slots) without a fault and with all questions: each must give `works`. Each case is one JSON
line of the result file; started again, the run goes on with what is missing there. The matrix is printed from the file.
Exit 1 below the bars.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gemma_neuron.port import Port  # noqa: E402
from scripts.mutants import (  # noqa: E402, F401
    arithmetic_faults,
    position_faults,
    prompt_faults,
    weight_faults,
)
from scripts.mutants.base import FAULTS, Fault  # noqa: E402
from scripts.mutants.matrix import row, table, totals  # noqa: E402
from scripts.mutants.run import Subject, judged  # noqa: E402
from scripts.mutants.settings import (  # noqa: E402
    Setting,
    clean_settings,
    cut_port,
    fewer_questions,
    setting_of,
)
from scripts.result_file import add_result, read_results  # noqa: E402

CLEAN = "none"
KINDS = ("prompt", "weights", "graph")
"""The order they run in."""


def main() -> int:
    asked = arguments()
    lines = results_of(asked)
    if asked.table:
        print(table(read_results(asked.results)))
        return 0
    torch.set_num_threads(
        1
    )  # one process a core: two threads wait for one another at each small product
    deadline = time.monotonic() + 60 * asked.minutes
    with ExitStack() as stack:
        work = asked.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work /= f"part-{asked.part[0]}"  # processes beside one another share no port
        for number, (setting, name, fault) in enumerate(wanted(asked, work, lines)):
            if time.monotonic() > deadline or number == asked.count:
                break
            line = case(asked, work, setting, name, fault)
            add_result(asked.results, line)
            print(row(line), flush=True)
    return totals(results_of(asked))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "gemma_neuron/data/demo-model")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the mutants")
    parser.add_argument("--port", type=Path, help="a compiled port of the model")
    parser.add_argument("--questions", type=int, default=12, help="how many a mutant is asked")
    parser.add_argument("--clean", type=int, default=0, help="settings to run without a fault")
    parser.add_argument("--count", type=int, help="at most so many cases in this run")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=Path("validate-mutants-results.jsonl"))
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="I/N: of N processes on one result file, the Ith"
    )
    parser.add_argument("--fault", default="", help="only faults whose name has this in it")
    parser.add_argument("--work", type=Path, help="keeps ports and goldens for the next run")
    parser.add_argument("--table", action="store_true", help="print the matrix as Markdown")
    return parser.parse_args()


def part(text: str) -> tuple[int, int]:
    index, of = map(int, text.split("/"))
    if not 1 <= index <= of:
        raise ValueError(text)
    return index, of


def wanted(
    asked: argparse.Namespace, work: Path, lines: list[dict[str, Any]]
) -> Iterator[tuple[Setting, str, Fault | None]]:
    """This part's share of what is not in the result file yet: mutants, then clean runs."""
    index, of = asked.part
    setting = Setting(asked.tp)
    done = {x["setting"] if x["kind"] == "clean" else x["fault"] for x in lines}
    port = subject_of(asked, work, setting).port
    geometry, chat = Port(port).geometry, bool(Port(port).record.fingerprints.template)
    ordered = sorted(FAULTS.items(), key=lambda item: KINDS.index(item[1].kind))
    for name, fault in ordered[index - 1 :: of]:
        fits = geometry.family in fault.families and (chat or fault.kind != "prompt")
        if fits and asked.fault in name and name not in done:
            yield setting, name, fault
    for clean in clean_settings(geometry.window)[: asked.clean][index - 1 :: of]:
        if clean.name not in done:
            yield clean, CLEAN, None


def subject_of(
    asked: argparse.Namespace, work: Path, setting: Setting, fault: Fault | None = None
) -> Subject:
    """The sound port: the compiled one where the fault leaves graphs alone, else one of the setting, cut when new."""
    folder = work / asked.model.name
    goldens, port = folder / "goldens", folder / setting.name.replace(", ", "_").replace(" ", "-")
    goldens.mkdir(parents=True, exist_ok=True)
    if asked.port is not None and fault is not None and fault.kind != "graph":
        port = asked.port
    else:
        cut_port(asked.model, port, setting)
    questions = fewer_questions(asked.model, asked.questions, folder / "questions.toml")
    return Subject(port, asked.model, goldens, None if fault is None else questions)


def case(
    asked: argparse.Namespace, work: Path, setting: Setting, name: str, fault: Fault | None
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "model": asked.model.name,
        "setting": setting.name,
        "fault": name,
        "kind": "clean" if fault is None else fault.kind,
    }
    try:
        subject = subject_of(asked, work, setting, fault)
        if subject.port == asked.port:
            line["setting"] = setting_of(Port(subject.port)).name + ", compiled"
        line |= judged(subject, work / "mutant", fault)
    except Exception as error:
        line["crash"] = f"{type(error).__name__}: {error}"[:300]
    return line


def results_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    return [line for line in read_results(asked.results) if line["model"] == asked.model.name]


if __name__ == "__main__":
    sys.exit(main())
