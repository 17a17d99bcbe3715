"""See scripts/neuron-contract. One line a check, appended to a result file as JSON too; exit 1 when one failed."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from gemma_neuron.demo import demo_folder, demo_question
from gemma_neuron.port import Port
from tests.neuron.flow import ROOT, compile_port, environment, run
from tests.tiny import write_tiny_gemma4

TINY = ("--dtype", "float32", "--max-context", 48, "--slots", 3, "--buckets", 24)
SIGNATURES = (
    "from gemma_neuron.backends.neuron import environment, sdk; environment.for_compiling(); "
    "kit = sdk.load(); import sys; "
    "sys.stdout.write(f'{len(sdk.calls())} recorded calls agree; {kit.functions.__file__}')"
)
Env = dict[str, str]
Check = tuple[str, Callable[[], str]]


class Failed(Exception):
    """A check did not hold; the message says how."""


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


def checks(env: Env, work: Path, quick: bool) -> Iterator[Check]:
    yield "calls", lambda: _calls(env)
    tiny = write_tiny_gemma4(work / "tiny", layers=2, sliding_window=8)
    for name, flags in (
        ("replicate-kv", ("--strategy", "replicate-kv")),
        ("replicate-global", ("--strategy", "replicate-global")),
        ("no layout", ("--no-layout",)),
    ):
        out = work / name.replace(" ", "-")
        yield f"equality, {name}", lambda f=flags, o=out: _equality(env, tiny, o, f)
    yield "another layout", lambda: _other_layout(env, tiny, work / "replicate-kv")
    if not quick:
        port = work / "bundled"
        yield "bundled: compile", lambda: _bundled(env, port)
        yield "bundled: validate", lambda: _verdict(env, port)
        yield "bundled: serve-local", lambda: _served(env, port)


def _calls(env: Env) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SIGNATURES],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Failed(done.stderr.strip()[-500:])
    return done.stdout


def _equality(env: Env, source: Path, out: Path, flags: tuple[str, ...]) -> str:
    done = compile_port(env, source, out, *TINY, *flags)
    if done.code != 0:
        raise Failed(done.stderr[-500:])
    units = done.document["units"]
    return f"{units['built']} units; {_against_stock(env, source, out)}"


def _against_stock(env: Env, source: Path, out: Path) -> str:
    asked = run(env, "tests.neuron.against_stock", source, out)
    if asked.code != 0:
        raise Failed(asked.stderr[-500:])
    found = asked.document
    shown = ", ".join(f"{phase} {value:.1e}" for phase, value in found["worst"].items())
    if max(found["worst"].values()) >= found["bar"]:
        raise Failed(f"largest difference of logits: {shown}")
    return f"largest difference of logits: {shown}"


def _other_layout(env: Env, source: Path, port: Path) -> str:
    """Decode is built again and the compiler chooses otherwise: all that follows it must be built again too."""
    (port / "graphs" / "decode-b3-l1" / "graph.committed").unlink()
    changed = env | {"STAND_IN_LAYOUT": "1"}
    done = compile_port(changed, source, port, *TINY, "--strategy", "replicate-kv")
    if done.code != 0 or done.document["units"]["reused"] != 0:
        raise Failed(done.stderr[-500:] or done.stdout)
    return f"4 units built anew; {_against_stock(changed, source, port)}"


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
    command = [sys.executable, "-m", "gemma_neuron", "serve-local", str(port), "--port", "0"]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        messages = [{"role": "user", "content": demo_question()}]
        body = json.dumps({"model": "demo", "messages": messages, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{ready['url']}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = json.loads(answer.read())["choices"][0]["message"]["content"]
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=120)
    return f"{demo_question()!r} -> {text!r}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/neuron-contract")
    parser.add_argument("--nxd-source", metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("neuron-contract.jsonl"))
    given = parser.parse_args()
    source = source_folder(given.nxd_source)
    print(f"neuronx_distributed {version_of(source)}", flush=True)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="neuron-contract-") as work,
        given.results.open("a") as file,
    ):
        env = environment(source, Path(work) / "state")
        for name, check in checks(env, Path(work), given.quick):
            started = time.monotonic()
            try:
                status, detail = "pass", check()
            except Failed as error:
                status, detail = "FAIL", str(error)
                failed += 1
            row = {"nxd": version_of(source), "check": name, "status": status, "detail": detail}
            row["seconds"] = f"{time.monotonic() - started:.0f}"
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{status}  {name}  ({row['seconds']} s)  {detail}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
