"""`bench`: load on a port or on any OpenAI-shaped server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron import settings
from gemma_neuron.commands.options import Json
from gemma_neuron.errors import EnvironmentProblem, UsageError
from gemma_neuron.render import emit_json, notice

STOP_SECONDS = 90.0


def bench(
    target: Annotated[str, typer.Argument(metavar="PORT|URL", help="A port's folder or a URL.")],
    concurrency: Annotated[str, typer.Option(help="Closed loop: requests at once, e.g. 1,8.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: requests a second, e.g. 0.5,2.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests a run.")] = 16,
    input_words: Annotated[int, typer.Option(min=1, help="Words of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    model: Annotated[str | None, typer.Option(help="Model to ask for; default: the first.")] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            help="Send ignore_eos, for answers of equal length; default: unless it is refused."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides prompts and arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a plot: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a server under load: TTFT, TPOT, throughput."""
    from gemma_neuron.render.bench import plot_runs, require_plot, show_runs
    from gemma_neuron.serving.bench import Load, find_target, run_load

    at_once = settings.counts(concurrency or (None if rate else "1,8"), "--concurrency") or ()
    rates = _rates(rate)
    if any(count < 1 for count in at_once):
        raise UsageError("--concurrency counts from 1.", "For example --concurrency 1,8.")
    require_plot(plot)
    remote = target.startswith(("http://", "https://"))
    with _url(target) if not remote else _as_it_is(target) as url:
        found = find_target(url, model, ignore_eos)
        if ignore_eos is None and not found.ignore_eos:
            notice(f"{found.url} refuses ignore_eos: answers may be shorter than --output-tokens")
        common = {"requests": requests, "seed": seed}
        lengths = {"input_words": input_words, "output_tokens": output_tokens}
        loads = [Load(concurrency=count, **common, **lengths) for count in at_once]
        loads += [Load(rate=value, **common, **lengths) for value in rates]
        runs = []
        for load in loads:
            notice(f"{load.name}: {requests} requests to {found.model} at {found.url}")
            runs.append(run_load(found, load))
    if plot is not None:
        plot_runs(plot, f"{found.model} at {target}", runs)
    if as_json:
        facts = {"target": target, "model": found.model, "ignore_eos": found.ignore_eos}
        emit_json(facts | {"runs": runs})
    else:
        show_runs(f"{found.model} at {target}", runs)
    if all(run["errors"] == run["requests"] for run in runs):
        raise EnvironmentProblem(f"Every request failed: {runs[0]['error']}", "Look at the server.")


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (0.0,)
    if any(not 0 < value < 1e6 for value in found):
        raise UsageError(f"--rate {text!r} is no list of rates.", "For example --rate 0.5,2.")
    return found


@contextmanager
def _as_it_is(url: str) -> Iterator[str]:
    yield url


@contextmanager
def _url(port: str) -> Iterator[str]:
    """Serve a port for as long as it is measured, whatever its verdict. Raises EnvironmentProblem."""
    command = [sys.executable, "-m", "gemma_neuron", "serve-local", port, "--port", "0"]
    with subprocess.Popen([*command, "--unvalidated"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                raise EnvironmentProblem(
                    f"`serve-local {port}` did not start (exit {server.wait()}).",
                    "What it said stands above.",
                )
            yield json.loads(line)["url"]
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
