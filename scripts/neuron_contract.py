"""See scripts/neuron-contract. One line a check, appended to a result file as JSON too; exit 1 when one failed."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from gemma_neuron.demo import demo_folder, demo_question
from gemma_neuron.port import Port
from scripts.checks import Check, Failed, output_of, run_checks
from tests.neuron.against_stock import write_stock
from tests.neuron.flow import ROOT, asked, compile_port, environment, run, run_command, serving
from tests.tiny import write_tiny_gemma4

TINY = ("--dtype", "float32", "--max-context", 48, "--slots", 3, "--buckets", 24)
SIGNATURES = (
    "from gemma_neuron.backends.neuron import environment, sdk; environment.for_compiling(); "
    "kit = sdk.load(); import sys; "
    "sys.stdout.write(f'{len(sdk.calls())} recorded calls agree; {kit.functions.__file__}')"
)
HOUR = (
    "signatures of the installed NxD",
    "tiny, without layout",
    "tiny, with layout",
    "the same command builds nothing",
    "two traces give one graph",
    "collectives of each graph",
)
"""Checks of the first hour that need neither devices nor a slice of 9 GB."""
Env = dict[str, str]


def source_folder(given: str | None) -> Path | None:
    """The folder to import NxD from, and a refusal of one that holds none."""
    if given is None:
        return None
    found = [p for p in (Path(given) / "src", Path(given)) if (p / "neuronx_distributed").is_dir()]
    if not found:
        sys.exit(f"error: {given} holds no neuronx_distributed.")
    return found[0].resolve()


def version_of(source: Path | None) -> str:
    if source is None:
        return "stand-in"
    text = (source / "neuronx_distributed" / "_version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    return found[1] if found else "unknown"


def tiny_checks(env: Env, work: Path) -> Iterator[Check]:
    """Every call, and tiny models against stock."""
    yield "calls", lambda: _calls(env)
    tiny = write_tiny_gemma4(work / "tiny", layers=2, sliding_window=8)
    stock = write_stock(tiny, work / "stock.safetensors")
    for name, flags in (
        ("replicate-kv", ("--strategy", "replicate-kv")),
        ("replicate-global", ("--strategy", "replicate-global")),
        ("no layout", ("--no-layout",)),
    ):
        out = work / name.replace(" ", "-")
        yield f"equality, {name}", lambda f=flags, o=out: _equality(env, tiny, o, stock, f)
    yield "another layout", lambda: _other_layout(env, tiny, work / "replicate-kv", stock)
    yield "first hour, tiny models", lambda: _first_hour(env, work / "hour")


def bundled_checks(env: Env, work: Path) -> Iterator[Check]:
    """The bundled model's way from checkpoint to answer."""
    port = work / "bundled"
    yield "bundled: compile", lambda: _bundled(env, port)
    yield "bundled: validate", lambda: _verdict(env, port)
    yield "bundled: serve-local", lambda: _served(env, port)


def _calls(env: Env) -> str:
    return output_of([sys.executable, "-c", SIGNATURES], env=env, cwd=ROOT)


def _equality(env: Env, source: Path, out: Path, stock: Path, flags: tuple[str, ...]) -> str:
    done = compile_port(env, source, out, *TINY, *flags)
    if done.code != 0:
        raise Failed(done.stderr[-500:])
    units = done.document["units"]
    return f"{units['built']} units; {_against_stock(env, out, stock)}"


def _against_stock(env: Env, out: Path, stock: Path) -> str:
    asked = run(env, "tests.neuron.against_stock", out, stock)
    if asked.code != 0:
        raise Failed(asked.stderr[-500:])
    found = asked.document
    shown = ", ".join(f"{phase} {value:.1e}" for phase, value in found["worst"].items())
    if max(found["worst"].values()) >= found["bar"]:
        raise Failed(f"largest difference of logits: {shown}")
    return f"largest difference of logits: {shown}"


def _other_layout(env: Env, source: Path, port: Path, stock: Path) -> str:
    """Decode is built again and the compiler chooses otherwise: all that follows it must be built again too."""
    (port / "graphs" / "decode-b3-l1" / "graph.committed").unlink()
    changed = env | {"STAND_IN_LAYOUT": "1"}
    done = compile_port(changed, source, port, *TINY, "--strategy", "replicate-kv")
    if done.code != 0 or done.document["units"]["reused"] != 0:
        raise Failed(done.stderr[-500:] or done.stdout)
    return f"4 units built anew; {_against_stock(changed, port, stock)}"


def _first_hour(env: Env, work: Path) -> str:
    """What scripts/first-hour-on-inf2 asks of an instance, as far as a machine without one can answer."""
    command = [sys.executable, ROOT / "scripts" / "first_hour.py", "--work", work]
    only = [argument for name in HOUR for argument in ("--only", name)]
    done = run_command([*command, *only], env)
    if done.code != 0:
        raise Failed(done.stdout[-500:] + done.stderr[-500:])
    return f"{done.stdout.count('pass  ')} of {len(HOUR)} pass"


def _bundled(env: Env, port: Path) -> str:
    done = compile_port(env, demo_folder(), port, "--max-context", 1024)
    if done.code != 0:
        raise Failed(done.stderr[-500:])
    layouts = {line["fields"].get("layout", "")[:12] for line in Port(port).ledger()}
    return f"{done.document['units']['built']} units in {done.document['seconds']:.0f} s, layouts {sorted(layouts)}"


def _verdict(env: Env, port: Path) -> str:
    done = run(env, "gemma_neuron", "validate", port, "--json")
    if done.code != 0:
        raise Failed(done.stderr[-500:] + done.stdout[-500:])
    found = done.document
    levels = ", ".join(f"{level['name']} {level['status']}" for level in found["levels"])
    return f"{found['verdict']} ({levels}); tokens {found['token_match']}"


def _served(env: Env, port: Path) -> str:
    messages = [{"role": "user", "content": demo_question()}]
    body = {"model": "demo", "messages": messages, "temperature": 0}
    try:
        with serving(env, port) as ready:
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
    version = version_of(source)
    print(f"neuronx_distributed {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="neuron-contract-") as work:
        env = environment(source, Path(work) / "state")
        todo = chain(
            () if given.bundled else tiny_checks(env, Path(work)),
            () if given.quick else bundled_checks(env, Path(work)),
        )
        return int(run_checks(todo, given.results, {"nxd": version}) > 0)


if __name__ == "__main__":
    sys.exit(main())
