"""Serving speed beside what others do on the same machine, in one run; every ratio is told, whichever way it falls.

The limit is weight bytes over measured memory bandwidth. Bare: a port's graphs without a server. Served: the same port
behind `serve-local`, as a client sees it. A port is compiled for a number of slots, and decode always runs all of
them, so each number of `--slots` has a port of its own. llama.cpp's server has the same weights in the same bits, the
same threads and slots, and gets the same load by the same client. Sides are run one after the other, `--rounds` times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import httpx2  # noqa: E402
from bench_decode import load_stock, ours, stock  # noqa: E402
from write_gguf import write_gguf  # noqa: E402

from gemma_neuron.chat import load_chat_assets  # noqa: E402
from gemma_neuron.pipeline import (  # noqa: E402
    CompileRequest,
    compile_port,
    open_port,
    runner_factory,
)
from gemma_neuron.port import Port  # noqa: E402
from gemma_neuron.render import notice  # noqa: E402
from gemma_neuron.serving.bench import (  # noqa: E402
    Load,
    Target,
    find_target,
    prompt_of,
    run_load,
)

PREFILL = 512
WORDS = 96
BANDWIDTH_BYTES = 2**30
START_SECONDS = 300.0
WANTED = {
    "decode_to_llama_cpp": 0.8,
    "decode_to_transformers": 1.8,
    "prefill_to_transformers": 1.0,
    "throughput_8_to_1_at_once": 3.0,
}
MOST_OVERHEAD_MS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--slots", default="1,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ports", type=Path, default=Path("bench-serve-ports"))
    parser.add_argument("--results", type=Path, default=Path("bench-serve-results.jsonl"))
    parser.add_argument("--llama-server", help="llama.cpp's llama-server")
    parser.add_argument("--without-llama-cpp", action="store_true")
    asked = parser.parse_args()
    if (asked.llama_server is None) != asked.without_llama_cpp:
        parser.error("give one of --llama-server and --without-llama-cpp")
    slots = [int(part) for part in asked.slots.split(",")]
    ports = {count: made(asked, count) for count in slots}
    gguf = None if asked.without_llama_cpp else same_weights(asked, ports[slots[0]])
    rounds = [one_round(asked, ports, gguf) for _ in range(asked.rounds)]
    found = {
        key: median([r.get(key) for r in rounds]) for key in sorted({k for r in rounds for k in r})
    }
    weights = weight_bytes(ports[slots[0]])
    found["limit_tokens_per_second"] = found["bandwidth_gb_per_second"] * 1e9 / weights
    line = {
        "source": asked.source.name,
        "dtype": asked.dtype,
        "rounds": asked.rounds,
        "weight_bytes": weights,
        **{key: round(value, 3) for key, value in found.items()},
        "ratios": (compared := ratios(found, slots)),
        "missed": missed(compared),
    }
    with asked.results.open("a") as results:
        results.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))
    return 1 if line["missed"] else 0


def made(asked: argparse.Namespace, slots: int) -> Port:
    """A port for so many slots, reused where it is there."""
    out = asked.ports / f"{asked.dtype}-slots{slots}"
    request = CompileRequest(
        out=out,
        backend="cpu",
        tp=1,
        dtype=asked.dtype,
        max_context=asked.context,
        slots=slots,
        buckets=(128, PREFILL),
        base=True,
    )
    compile_port(str(asked.source), request, None, notice)
    return open_port(out)


def same_weights(asked: argparse.Namespace, port: Port) -> Path:
    """The checkpoint as GGUF, reused where it is there: its name has the checkpoint's digest."""
    out: Path = asked.ports / f"{port.record.fingerprints.checkpoint[:12]}-{asked.dtype}.gguf"
    if not out.is_file():
        notice(f"writing {out}")
        write_gguf(asked.source, out, asked.dtype)
    return out


def one_round(
    asked: argparse.Namespace, ports: dict[int, Port], gguf: Path | None
) -> dict[str, float]:
    found = {"bandwidth_gb_per_second": bandwidth()}
    assets = load_chat_assets(asked.source)
    ids = (assets.completion_ids("The keeper wrote down the weather. ") * PREFILL)[:PREFILL]
    model = load_stock(asked.source, asked.dtype)
    stock(model, ids, 4)
    found |= timed("transformers", stock(model, ids, asked.steps))
    del model
    for slots, port in ports.items():
        runner = runner_factory(port)()
        ours(runner, ids, 4)
        found |= timed(f"bare_{slots}_slots", ours(runner, ids, asked.steps))
        # What the server adds to a token is told behind the prompts that it is sent.
        served_ids = assets.completion_ids(prompt_of(load_of(1, asked.steps), 0))
        _, seconds, _ = ours(runner, served_ids, asked.steps)
        found[f"bare_{slots}_slots_as_served_tpot_ms"] = 1000 * statistics.median(seconds)
        runner.close()
        command = [sys.executable, "-m", "gemma_neuron", "serve-local", str(port.path)]
        with served([*command, "--unvalidated"]) as url:
            target = find_target(url, None, None)
            found |= loaded(f"served_{slots}_slots", target, slots, asked.steps)
    if gguf is not None:
        for slots in ports:
            command = [asked.llama_server, "-m", str(gguf), "--threads", str(os.cpu_count())]
            command += ["-np", str(slots), "-c", str(asked.context * slots)]
            with served(command) as url:
                name = f"llama_cpp_{slots}_slots"
                found |= loaded(name, find_target(url, None, True), slots, asked.steps)
    return found


def timed(name: str, run: tuple[float, list[float], list[int]]) -> dict[str, float]:
    prefill, seconds, _ = run
    return {
        f"{name}_decode_tokens_per_second": 1 / statistics.median(seconds),
        f"{name}_prefill_tokens_per_second": PREFILL / prefill,
    }


def load_of(clients: int, steps: int) -> Load:
    return Load(concurrency=clients, requests=3 * clients, input_words=WORDS, output_tokens=steps)


def loaded(name: str, target: Target, most: int, steps: int) -> dict[str, float]:
    """One client at once, and as many as there are slots."""
    found: dict[str, float] = {}
    for clients in sorted({1, most}):
        load = load_of(clients, steps)
        run = run_load(target, load)
        if run["errors"]:
            raise SystemExit(f"{name}: {run['errors']} requests failed: {run['error']}")
        if run["output_tokens"] != load.requests * steps:
            raise SystemExit(
                f"{name}: {run['output_tokens_a_request']} tokens a request, {steps} were asked for"
            )
        found[f"{name}_{clients}_at_once_tokens_per_second"] = run["tokens_per_second"]
        found[f"{name}_{clients}_at_once_tpot_ms"] = run["tpot_ms"]["p50"]
        found[f"{name}_{clients}_at_once_ttft_ms"] = run["ttft_ms"]["p50"]
    return found


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """A server on a free port, up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, cwd=ROOT)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while not ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ready(url: str) -> bool:
    """Ours by its readiness, llama.cpp's by /health."""
    for path in ("/health/ready", "/health"):
        try:
            if httpx2.get(url + path, timeout=5.0).status_code == 200:
                return True
        except httpx2.HTTPError:
            return False
    return False


def bandwidth() -> float:
    """GB/s at which memory is read by all threads: the best of five sums of a gigabyte."""
    import torch

    values = torch.ones(BANDWIDTH_BYTES // 4)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return BANDWIDTH_BYTES / best / 1e9


def weight_bytes(port: Port) -> int:
    """What a decode step must read: all weights once."""
    return sum(port.rank_file(rank).stat().st_size for rank in range(port.plan.tp))


def median(values: list[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def ratios(found: dict[str, float], slots: list[int]) -> dict[str, float]:
    """The comparisons that matter, each a plain quotient (overhead: milliseconds)."""
    least, most = min(slots), max(slots)
    one = found[f"served_{least}_slots_1_at_once_tpot_ms"]
    out = {
        "decode_to_transformers": found[f"bare_{least}_slots_decode_tokens_per_second"]
        / found["transformers_decode_tokens_per_second"],
        "prefill_to_transformers": found[f"bare_{least}_slots_prefill_tokens_per_second"]
        / found["transformers_prefill_tokens_per_second"],
        "decode_to_limit": found[f"bare_{least}_slots_decode_tokens_per_second"]
        / found["limit_tokens_per_second"],
        "overhead_ms_a_token": one - found[f"bare_{least}_slots_as_served_tpot_ms"],
        f"throughput_{most}_to_1_at_once": found[
            f"served_{most}_slots_{most}_at_once_tokens_per_second"
        ]
        / found[f"served_{least}_slots_1_at_once_tokens_per_second"],
    }
    theirs = f"llama_cpp_{least}_slots_1_at_once"
    if f"{theirs}_tpot_ms" in found:
        ours_at_one, many = f"served_{least}_slots_1_at_once", f"{most}_slots_{most}_at_once"
        out["decode_to_llama_cpp"] = found[f"{theirs}_tpot_ms"] / one
        out["ttft_to_llama_cpp"] = found[f"{theirs}_ttft_ms"] / found[f"{ours_at_one}_ttft_ms"]
        out[f"throughput_at_{most}_to_llama_cpp"] = (
            found[f"served_{many}_tokens_per_second"] / found[f"llama_cpp_{many}_tokens_per_second"]
        )
    return {key: round(value, 3) for key, value in out.items()}


def missed(found: dict[str, float]) -> list[str]:
    """What is wanted and was measured otherwise, in words."""
    out = [
        f"{key} {found[key]}, at least {least:g}"
        for key, least in WANTED.items()
        if key in found and found[key] < least
    ]
    if found["overhead_ms_a_token"] > MOST_OVERHEAD_MS:
        out.append(
            f"overhead_ms_a_token {found['overhead_ms_a_token']}, at most {MOST_OVERHEAD_MS:g}"
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
