"""See scripts/neuron-contract. One line a check, appended to a result file as JSON too; exit 1 when one failed.

A check that passed there, on the same NxD and with the same code of ours, is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from gemma_neuron.artifacts import source_digest
from gemma_neuron.backends.neuron.backend import GRAPH_SOURCES
from gemma_neuron.demo import demo_folder, demo_question
from gemma_neuron.port import Port
from scripts import first_hour
from scripts.checks import Check, Failed, alone, output_of, passed, run_rest
from scripts.nxd_source import source_folder, version_of
from tests.neuron import trace_memory
from tests.neuron.against_stock import write_stock
from tests.neuron.flow import (
    ROOT,
    Done,
    asked,
    compile_port,
    environment,
    run,
    run_command,
    serving,
)
from tests.tiny import write_tiny_gemma4

TINY = ("--dtype", "float32", "--max-context", 48, "--slots", 3, "--buckets", 24)
STRATEGIES = {
    "replicate-kv": ("--strategy", "replicate-kv"),
    "replicate-global": ("--strategy", "replicate-global"),
    "no layout": ("--no-layout",),
}
BUNDLED, BUNDLED_FLAGS = "bundled", ("--max-context", 1024)
MEMORY_TOLERANCE = 0.15
SIGNATURES = (
    "from gemma_neuron.backends.neuron import environment, sdk; environment.for_compiling(); "
    "kit = sdk.load(); import sys; "
    "sys.stdout.write(f'{len(sdk.calls())} recorded calls agree; {kit.functions.__file__}')"
)
NOT_HERE = ("doctor", "the bundled model's verdict", "the bundled model served")
"""Checks of the first hour that need devices, or that are checks of their own here."""
Env = dict[str, str]


@dataclass(frozen=True)
class Bench:
    """Where the checks work. What one needs of another is made again when its folder is gone."""

    env: Env
    work: Path

    @cached_property
    def tiny(self) -> Path:
        return write_tiny_gemma4(self.work / "tiny", layers=2, sliding_window=8)

    @cached_property
    def stock(self) -> Path:
        return write_stock(self.tiny, self.work / "stock.safetensors")

    def compiled(self, env: Env, source: Path, name: str, *flags: object) -> Done:
        """What `compile` answers. Raises Failed."""
        done = compile_port(env, source, self.work / name, *flags)
        if done.code != 0:
            raise Failed(done.stderr[-500:] or done.stdout[-500:])
        return done

    def port(self, source: Path, name: str, *flags: object) -> Path:
        if not (self.work / name).is_dir():
            self.compiled(self.env, source, name, *flags)
        return self.work / name


def tiny_checks(bench: Bench) -> Iterator[Check]:
    """Every call, tiny models against stock, and a slice's memory."""
    yield "calls", partial(_calls, bench.env)
    for name, flags in STRATEGIES.items():
        yield f"equality, {name}", partial(_equality, bench, name, flags)
    yield "another layout", partial(_other_layout, bench)
    yield "first hour, tiny models", partial(_first_hour, bench)
    for unit in trace_memory.UNITS:
        yield f"six layers of 31B, memory of a trace: {unit}", partial(_memory, bench, unit)
    yield "rank files are mapped", partial(_mapped, bench)


def bundled_checks(bench: Bench) -> Iterator[Check]:
    """The bundled model's way from checkpoint to answer."""
    yield "bundled: compile", partial(_bundled, bench)
    yield "bundled: validate", partial(_verdict, bench)
    yield "bundled: serve-local", partial(_served, bench)


def _calls(env: Env) -> str:
    return output_of([sys.executable, "-c", SIGNATURES], env=env, cwd=ROOT)


def port_name(strategy: str) -> str:
    """With blanks and a quote, which must not reach a command line that is taken apart."""
    return f"{strategy}'s port"


def _equality(bench: Bench, name: str, flags: tuple[str, ...]) -> str:
    done = bench.compiled(bench.env, bench.tiny, port_name(name), *TINY, *flags)
    shown = _against_stock(bench.env, bench.work / port_name(name), bench.stock)
    return f"{done.document['units']['total']} units; {shown}"


def _against_stock(env: Env, out: Path, stock: Path) -> str:
    asked = run(env, "tests.neuron.against_stock", out, stock)
    if asked.code != 0:
        raise Failed(asked.stderr[-500:])
    found = asked.document
    shown = ", ".join(f"{phase} {value:.1e}" for phase, value in found["worst"].items())
    if max(found["worst"].values()) >= found["bar"]:
        raise Failed(f"largest difference of logits: {shown}")
    return f"largest difference of logits: {shown}"


def _other_layout(bench: Bench) -> str:
    """Decode is built again and the compiler chooses otherwise: all that follows it must be built again too."""
    name, flags = port_name("replicate-kv"), (*TINY, *STRATEGIES["replicate-kv"])
    changed, other = bench.env | {"STAND_IN_LAYOUT": "1"}, bench.work / "another-layout"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(bench.port(bench.tiny, name, *flags), other)
    (other / "graphs" / "decode-b3-l1" / "graph.committed").unlink()
    units = bench.compiled(changed, bench.tiny, other.name, *flags).document["units"]
    if units["reused"] != 0:
        raise Failed(f"{units['reused']} units were reused")
    return f"{units['built']} units built anew; {_against_stock(changed, other, bench.stock)}"


def _first_hour(bench: Bench) -> str:
    """What scripts/first-hour-on-inf2 asks of an instance, on six layers of the tiny model for those of the 31B."""
    few, work = bench.work / "slice", bench.work / "hour"
    if not few.is_dir():
        # Few heads: stand-ins hold all ranks' scores at once, some GB of them.
        facts = {"num_attention_heads": 8, "max_position_embeddings": 4096}
        write_tiny_gemma4(few, layers=6, sliding_window=1024, **facts)
    command = [sys.executable, ROOT / "scripts" / "first_hour.py", "--slice", few, "--work", work]
    names = [name for name in first_hour.CHECKS if name not in NOT_HERE]
    results = work / "first-hour.jsonl"
    before = passed(results)
    only = [argument for n in names if n not in before for argument in ("--only", n)]
    if only and (done := run_command([*command, *only], bench.env)).code != 0:
        raise Failed(done.stdout[-500:] + done.stderr[-500:])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    far = {row["check"]: row["detail"] for row in rows if row["check"].startswith("six layers")}
    return f"{len(passed(results).intersection(names))} of {len(names)} pass; {far}"


def _memory(bench: Bench, unit: str) -> str:
    """What tracing adds to the process is to be what is predicted; the process itself is no one's: it has stand-ins
    where torch_xla would be, with which `scripts/lowering-check` measures the whole."""
    done = run(bench.env, "tests.neuron.trace_memory", unit)
    if done.code != 0:
        raise Failed(done.stderr[-500:])
    found = done.document
    share = found["added_bytes"] / found["predicted_bytes"] - 1
    shown = (
        f"{found['added_bytes'] / 1e9:.2f} GB above the process's {found['base_bytes'] / 1e9:.2f} GB, "
        f"predicted {found['predicted_bytes'] / 1e9:.2f} GB ({share:+.1%}); graph {found['graph_bytes']} bytes"
    )
    if abs(share) > MEMORY_TOLERANCE:
        raise Failed(shown)
    return shown


def _mapped(bench: Bench) -> str:
    """A rank of some 30 MB: what the process takes of its own to hand it to the runtime."""
    wide = bench.work / "wide"
    if not wide.is_dir():
        write_tiny_gemma4(wide, layers=2, hidden_size=2048, intermediate_size=8192)
    bench.compiled(bench.env, wide, "mapped", "--max-context", 48, "--buckets", 24)
    done = run(bench.env, "tests.neuron.mapped", bench.work / "mapped")
    if done.code != 0:
        raise Failed(done.stderr[-500:])
    total, own = done.document["weight_bytes"], done.document["own_bytes"]
    shown = f"{total} bytes of weights, {own} of the process's own"
    if own > total / 4:
        raise Failed(shown)
    return shown


def _bundled(bench: Bench) -> str:
    found = bench.compiled(bench.env, demo_folder(), BUNDLED, *BUNDLED_FLAGS).document
    layouts = {
        line["fields"].get("layout", "")[:12] for line in Port(bench.work / BUNDLED).ledger()
    }
    units = found["units"]
    return f"{units['total']} units, {units['built']} built in {found['seconds']:.0f} s, layouts {sorted(layouts)}"


def _verdict(bench: Bench) -> str:
    port = bench.port(demo_folder(), BUNDLED, *BUNDLED_FLAGS)
    done = run(bench.env, "gemma_neuron", "validate", port, "--json")
    if done.code != 0:
        raise Failed(done.stderr[-500:] + done.stdout[-500:])
    found = done.document
    levels = ", ".join(f"{level['name']} {level['status']}" for level in found["levels"])
    return f"{found['verdict']} ({levels}); tokens {found['token_match']}"


def _served(bench: Bench) -> str:
    """A port serves when its verdict is `works`, which `validate` has left in it."""
    port = bench.port(demo_folder(), BUNDLED, *BUNDLED_FLAGS)
    if not (port / "validation.json").is_file():
        _verdict(bench)
    messages = [{"role": "user", "content": demo_question()}]
    body = {"model": "demo", "messages": messages, "temperature": 0}
    try:
        with serving(bench.env, port) as ready:
            answer = asked(f"{ready['url']}/v1/chat/completions", body, timeout=600)
    except (RuntimeError, OSError) as error:
        raise Failed(str(error)[-500:]) from error
    return f"{demo_question()!r} -> {answer['choices'][0]['message']['content']!r}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/neuron-contract")
    parser.add_argument("--nxd-source", metavar="DIR")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="without the bundled model")
    part.add_argument("--bundled", action="store_true", help="the bundled model alone")
    parser.add_argument("--results", type=Path, default=Path("neuron-contract.jsonl"))
    given = parser.parse_args()
    source = source_folder(given.nxd_source)
    facts = {"nxd": version_of(source), "source": source_digest(*GRAPH_SOURCES)[:12]}
    with alone(given.results, "--results"):
        return examine(given, source, facts)


def examine(given: argparse.Namespace, source: Path | None, facts: dict[str, str]) -> int:
    """All that has not passed yet; whether something failed."""
    print(f"neuronx_distributed {facts['nxd']}", flush=True)
    work = given.results.with_suffix(".work").resolve() / f"{facts['nxd']}-{facts['source']}"
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(environment(source, work / "state"), work)
    todo = chain(
        () if given.bundled else tiny_checks(bench), () if given.quick else bundled_checks(bench)
    )
    failed = run_rest(todo, given.results, facts)
    if not failed:
        shutil.rmtree(work)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
