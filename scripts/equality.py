"""Random tiny models of each family against stock transformers, drawn by hypothesis, over tp and strategy.

Compiled as `gemma-neuron compile` does it, unless --uncompiled. One JSON line a case in the result file; a case that is
refused must be one that does not divide. Started again, it goes on after the last case of each family.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.result_file import add_result, read_results
from tests.eager import eager_port
from tests.equality.cases import compiled_port, draw_case, run_case
from tests.families import FAMILIES

Line = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="cases a family")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=Path("equality-results.jsonl"))
    parser.add_argument("--bundled", type=Path, help="compile the bundled model at every tp there")
    parser.add_argument(
        "--commands", type=Path, help="the command line on tiny models, ports there"
    )
    parser.add_argument(
        "--uncompiled", action="store_true", help="the same graphs without a compiler"
    )
    parser.add_argument("--family", choices=("all", *FAMILIES), action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # models this small are slower on two
    if asked.bundled is not None:
        return bundled(asked.bundled)
    families = [f for f in FAMILIES if {f, "all"} & set(asked.family or ["all"])]
    if asked.commands is not None:
        return commands(asked.commands, families)
    kind = "uncompiled" if asked.uncompiled else "compiled"
    if kind == "compiled":
        warm_up()
    deadline = time.monotonic() + asked.minutes * 60
    # Number by number, not family by family: a run cut short has seen all of them.
    for number in range(asked.count):
        for family in families:
            if done(asked.results, family, number, kind) or time.monotonic() > deadline:
                continue
            line = one(family, number, kind)
            add_result(asked.results, line)
            print(json.dumps(line), flush=True)
    return totals(read_results(asked.results), kind)


def warm_up() -> None:
    """Start the server that compiling processes are forked from, compiler imported: else each imports it again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "gemma_neuron.compilation.worker",
            "gemma_neuron.backends.cpu.compiler",
            "torch._inductor.compile_fx",
        ]
    )
    multiprocessing.forkserver.ensure_running()


def done(results: Path, family: str, number: int, kind: str) -> bool:
    mine = {"family": family, "number": number, "kind": kind}
    return any(mine.items() <= line.items() for line in read_results(results))


def one(family: str, number: int, kind: str) -> Line:
    make = compiled_port if kind == "compiled" else eager_port
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_case(draw_case(family, number), Path(folder), make)
    seconds = round(time.monotonic() - started, 1)
    return {"family": family, "number": number, "kind": kind, "seconds": seconds, **found}


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
    from tests.equality.compare import BAR, texts_of, worst
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


def commands(folder: Path, families: list[str]) -> int:
    """`compile` and `validate` by the command line on one tiny random model a family, at tp 2.

    Random weights answer nothing, so the verdict wanted is `matches-but-broken`: all that compares a port with its
    reference passes, all that asks for sense does not.
    """
    from tests.bundled.conftest import gemma_neuron
    from tests.families import write_family

    failed = 0
    for family in families:
        source = write_family(folder / family / "source", family)
        port = folder / family / "port"
        made = gemma_neuron(
            *(
                "compile",
                source,
                "--out",
                port,
                "--backend",
                "cpu",
                "--tp",
                2,
                "--dtype",
                "float32",
            ),
            *("--max-context", 1024, "--buckets", "64", "--slots", 2, "--json"),
        )
        judged = gemma_neuron("validate", port, "--json")
        levels = {level["level"]: level["status"] for level in judged.document.get("levels", ())}
        good = (made.code, judged.code, judged.document.get("verdict")) == (
            0,
            7,
            "matches-but-broken",
        )
        good = good and all(levels.get(level) == "pass" for level in (0, 1, 3, 4))
        failed += not good
        print(f"{family}: {judged.document.get('verdict')}, levels {levels}", flush=True)
        if not good:
            print(made.stderr, judged.stderr, judged.stdout, sep="\n")
    return 1 if failed else 0


def totals(lines: list[Line], kind: str) -> int:
    """Print totals a family; 1 when any case failed."""
    failed = 0
    for family in FAMILIES:
        mine = [line for line in lines if (line["family"], line["kind"]) == (family, kind)]
        if not mine:
            continue
        equal = [line for line in mine if line["outcome"] == "equal"]
        refused = sum(line["outcome"] == "refused" for line in mine)
        wrong = len(mine) - len(equal) - refused
        failed += wrong
        worst = max((line["worst"] for line in equal), default=0.0)
        placements = sorted({p for line in equal for p in line["placements"]})
        degrees = sorted({line["tp"] for line in equal})
        print(
            f"{family}, {kind}: {len(mine)} cases, {len(equal)} equal (worst {worst:.1e} of the largest "
            f"logit; tp {', '.join(map(str, degrees))}; {', '.join(placements)}), {refused} refused "
            f"({refused / len(mine):.0%}), {wrong} wrong"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
