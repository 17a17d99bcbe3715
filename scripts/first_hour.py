"""See scripts/first-hour-on-inf2. Each check settles a point that could not be settled without a NeuronCore."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gemma_neuron.demo import demo_folder, demo_question
from scripts.checks import Check, Failed, alone, output_of, passed, run_checks
from tests.neuron.flow import ROOT, asked, serving

TINY = ("--dtype", "float32", "--max-context", "48", "--slots", "3", "--buckets", "24")
SLICE = ("--max-context", "2560", "--slots", "1", "--buckets", "512")
MOST_TIMES_NOISE = 3.0
"""How much farther from stock's float32 a port may be than stock's own bfloat16 is: its sums run in another order. A
wrong layer or position is tens of times as far."""
BUNDLED = ("--max-context", "1024")
PATIENCE_SECONDS = 300
"""For a killed replica to be replaced, its graphs loaded again."""


@dataclass(frozen=True)
class Hour:
    work: Path
    slice: Path | None
    tiny: Path = field(init=False)
    stock: Path = field(init=False)
    """Stock's logits for `tiny`, in a file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", self.work / "tiny")
        object.__setattr__(self, "stock", self.work / "tiny-stock.safetensors")

    def sources(self) -> None:
        from tests.neuron.against_stock import write_stock
        from tests.tiny import write_tiny_gemma4

        if not self.tiny.is_dir():
            write_tiny_gemma4(self.tiny, layers=2, sliding_window=8)
        write_stock(self.tiny, self.stock)


def command(*arguments: object) -> dict[str, Any]:
    """A gemma-neuron command's JSON answer. Raises Failed with its error."""
    done = subprocess.run(
        [sys.executable, "-m", "gemma_neuron", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise Failed(done.stderr.strip()[-500:]) from None
    if "error" in found:
        raise Failed(f"{found['error']['message']} {found['error']['hint']}")
    return found


def script(code: str, *arguments: object) -> str:
    """The last line a fresh process prints: cores belong to a process until it ends."""
    return output_of([sys.executable, "-c", code, *arguments]).strip().splitlines()[-1]


def doctor(hour: Hour) -> str:
    bad = [c for c in command("doctor")["checks"] if c["status"] == "fail"]
    if bad:
        raise Failed("; ".join(f"{c['name']}: {c['found']} ({c['remedy']})" for c in bad))
    return "no check fails"


def signatures(hour: Hour) -> str:
    return script(
        "from gemma_neuron.backends.neuron import environment, sdk; environment.for_compiling(); "
        "sdk.load(); import importlib.metadata as m; "
        "print(len(sdk.calls()), 'recorded calls agree with', m.version('neuronx-distributed'))"
    )


def compile_tiny(hour: Hour, name: str, *flags: str) -> Path:
    out = hour.work / name
    command("compile", hour.tiny, "--out", out, "--backend", "neuron", "--tp", 8, *TINY, *flags)
    return out


def against_stock(port: Path, stock: Path) -> str:
    command = [sys.executable, "-m", "tests.neuron.against_stock", port, stock]
    found = json.loads(output_of(command, cwd=ROOT))
    # float32 on these cores is not the CPU's: products may pass through shorter formats.
    if max(found["worst"].values()) > 100 * found["bar"]:
        raise Failed(f"largest difference of logits {found['worst']}")
    return f"largest difference of logits {found['worst']}"


def tiny_plain(hour: Hour) -> str:
    return against_stock(compile_tiny(hour, "plain", "--no-layout"), hour.stock)


def tiny_layout(hour: Hour) -> str:
    port = compile_tiny(hour, "layout")
    chosen = (port / "graphs" / "decode-b3-l1" / "layout.hlo").is_file()
    return f"layout {'changed' if chosen else 'unchanged'}; {against_stock(port, hour.stock)}"


def reuse(hour: Hour) -> str:
    again = command(
        "compile", hour.tiny, "--out", hour.work / "layout", "--backend", "neuron", "--tp", 8, *TINY
    )
    if again["units"]["built"]:
        raise Failed(f"the same command built {again['units']['built']} units again")
    return f"{again['units']['reused']} units reused"


def stable_graphs(hour: Hour) -> str:
    """Two traces of one unit must be one graph: otherwise keys never hit after our own code changed."""
    digests = []
    for name in ("dry-1", "dry-2"):
        out = hour.work / name
        command(
            "compile", hour.tiny, "--out", out, "--backend", "neuron", "--tp", 8, *TINY, "--dry-run"
        )
        digests.append(
            script(
                "import sys; from torch_neuronx.pyhlo import hlo_pb2; from pathlib import Path; "
                "from gemma_neuron.backends.neuron.tracer import hlo_digest; m = hlo_pb2.HloModuleProto(); "
                "m.ParseFromString(Path(sys.argv[1]).read_bytes()); print(hlo_digest(m))",
                out / "decode-b3-l1" / "graph.hlo",
            )
        )
    if digests[0] != digests[1]:
        raise Failed(f"two traces differ: {digests}")
    return digests[0][:16]


def collectives(hour: Hour) -> str:
    """Two layers: one sum for the embedding, two a layer, one gather, none left from another bucket."""
    return script(
        "import sys, collections; from torch_neuronx.pyhlo import hlo_pb2; from pathlib import Path\n"
        "for unit in ('decode-b3-l1', 'prefill-b1-l24'):\n"
        "  m = hlo_pb2.HloModuleProto(); m.ParseFromString((Path(sys.argv[1]) / unit / 'graph.hlo').read_bytes())\n"
        "  c = collections.Counter(i.opcode for x in m.computations for i in x.instructions)\n"
        "  assert (c['all-reduce'], c['all-gather']) == (5, 1), (unit, c)\n"
        "print('5 all-reduce and 1 all-gather in each graph')",
        hour.work / "dry-1",
    )


def slice_of(hour: Hour) -> Path:
    if hour.slice is not None:
        return hour.slice
    out = hour.work / "slice"
    if not out.is_dir():
        output_of([sys.executable, ROOT / "scripts" / "make_slice.py", out])
    return out


def long_positions(strategy: str) -> Callable[[Hour], str]:
    def check(hour: Hour) -> str:
        source, out = slice_of(hour), hour.work / f"slice-{strategy}"
        given = ("--tp", 8, "--strategy", strategy, *SLICE)
        made = command("compile", source, "--out", out, "--backend", "neuron", *given)
        planned = command("plan", source, *given)["host_peak_bytes"]["compile"]
        measure = [sys.executable, "-m", "scripts.first_hour_positions"]
        stock = hour.work / "slice-stock.safetensors"
        if not stock.is_file():
            output_of([*measure, "reference", source, stock], cwd=ROOT)
        found = json.loads(output_of([*measure, "compare", out, stock], cwd=ROOT))
        far = {n: times for n, times in found["times_noise"].items() if times > MOST_TIMES_NOISE}
        if far:
            raise Failed(f"farther from stock than rounding explains, by prompt length: {far}")
        return (
            f"compiled in {made['seconds']:.0f} s, host peak {made['host_peak_bytes'] / 1e9:.1f} GB, planned "
            f"{planned / 1e9:.1f} GB; difference in multiples of bfloat16's own {found['times_noise']}; "
            f"decode {found['ms']:.1f} ms a token"
        )

    return check


def bundled(hour: Hour) -> str:
    """From checkpoint to verdict, in bfloat16, on weights that know answers."""
    out, given = hour.work / "bundled", ("--backend", "neuron", "--tp", 8, *BUNDLED)
    command("compile", demo_folder(), "--out", out, *given)
    found = command("validate", out)
    if found["verdict"] != "works":
        wrong = [f"{x['name']} {x['status']}: {x['reason']}" for x in found["levels"]]
        raise Failed(f"{found['verdict']}: {'; '.join(wrong)}")
    return f"works; tokens {found['token_match']}"


def serve(hour: Hour) -> str:
    """Twice: the second finds the cores that the first, ended by TERM, has left."""
    messages = [{"role": "user", "content": demo_question()}]
    body = {"model": "demo", "messages": messages, "temperature": 0}
    answers = set()
    for _ in range(2):
        with served(hour.work / "bundled") as ready:
            answer = asked(f"{ready['url']}/v1/chat/completions", body, timeout=600)
            answers.add(answer["choices"][0]["message"]["content"])
    if len(answers) != 1:
        raise Failed(f"two answers to one question: {answers}")
    return f"{demo_question()!r} -> {answers.pop()!r}, twice"


def killed(hour: Hour) -> str:
    """Last, for it may cost a reboot: whether cores can be used again after SIGKILL of the process that had them."""
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 3, "temperature": 0}
    with served(hour.work / "plain", "--unvalidated") as ready:
        url = f"{ready['url']}/v1/completions"
        before = asked(url, body, timeout=600)["choices"]
        started = time.monotonic()
        os.kill(ready["replicas"][0]["pid"], signal.SIGKILL)
        after = asked(url, body, timeout=PATIENCE_SECONDS)["choices"]
        seconds = time.monotonic() - started
    if before != after:
        raise Failed(f"another answer than before: {after}, {before}")
    return f"answered again after {seconds:.0f} s; `gemma-neuron doctor` may still call the cores suspect"


@contextmanager
def served(port: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """Raises Failed with what a server says that does not start, or does not answer."""
    try:
        with serving(dict(os.environ), port, *flags) as ready:
            yield ready
    except (RuntimeError, OSError) as error:
        raise Failed(str(error)[-500:]) from error


CHECKS: dict[str, Callable[[Hour], str]] = {
    "doctor": doctor,
    "signatures of the installed NxD": signatures,
    "tiny, without layout": tiny_plain,
    "tiny, with layout": tiny_layout,
    "the same command builds nothing": reuse,
    "two traces give one graph": stable_graphs,
    "collectives of each graph": collectives,
    "six layers of 31B, replicate-kv": long_positions("replicate-kv"),
    "six layers of 31B, replicate-global": long_positions("replicate-global"),
    "the bundled model's verdict": bundled,
    "the bundled model served": serve,
    "cores after a kill": killed,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/first-hour-on-inf2")
    parser.add_argument(
        "--slice", type=Path, help="a checkpoint by scripts/make-slice (default: made)"
    )
    parser.add_argument("--work", type=Path, default=Path("first-hour"))
    parser.add_argument("--only", action="append", choices=CHECKS, default=[])
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    hour, results = Hour(work, given.slice and given.slice.resolve()), work / "first-hour.jsonl"
    with alone(results, "--work"):
        return examine(hour, results, given.only)


def examine(hour: Hour, results: Path, only: list[str]) -> int:
    """What was asked for, or all that has not passed yet; whether something failed."""
    hour.sources()
    before = passed(results)
    todo: list[Check] = [
        (name, partial(check, hour))
        for name, check in CHECKS.items()
        if (name in only if only else name not in before)
    ]
    failed = run_checks(todo, results)
    print(f"{len(before)} had passed before")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
