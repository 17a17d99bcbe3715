"""`serve-local` and `chat`: talk to a port."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron import interrupts
from gemma_neuron.commands.options import Json, PortArg
from gemma_neuron.errors import UsageError
from gemma_neuron.render import notice

MOST_REPLICAS = 64


def serve_local(
    port: PortArg,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    unvalidated: Annotated[bool, typer.Option(help="Serve whatever the verdict.")] = False,
    no_auth: Annotated[bool, typer.Option(help="No key beyond loopback.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name it is asked by; repeatable.")
    ] = None,
    allow_control_text: Annotated[
        bool, typer.Option(help="Let messages spell control tokens.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Processes that each hold the model.")] = 1,
    hang_after: Annotated[
        float, typer.Option(help="Seconds without a sign of life: a replica is replaced.")
    ] = 10.0,
    step_seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Longest step of the model; by default measured in loading."),
    ] = None,
    load_seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest silence of a replica that loads.")
    ] = 120.0,
    request_seconds: Annotated[
        float, typer.Option(min=1.0, help="Longest that an answer may take.")
    ] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="For running answers to end after SIGTERM.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Serve a validated port: OpenAI's API on loopback."""
    from gemma_neuron.pipeline import keeps_devices, open_port, replica_loader
    from gemma_neuron.serving.local import ServeOptions, serve

    if not 0 <= http_port < 2**16:
        raise UsageError(f"--port {http_port} is no port.", "Use 0 to 65535; 0 takes a free one.")
    if not 1 <= replicas <= MOST_REPLICAS:
        raise UsageError(f"--replicas {replicas}: give 1 to {MOST_REPLICAS}.", "Leave it out.")
    if not 1.0 <= hang_after <= 3600.0:
        raise UsageError(f"--hang-after {hang_after:g}: give 1 to 3600 seconds.", "Leave it out.")
    try:
        opened = open_port(port, notice)
        load, preload = replica_loader(opened, replicas)
        serve(
            opened,
            load,
            replicas=replicas,
            host=host,
            http_port=http_port,
            unvalidated=unvalidated,
            announce=emit_ready,
            options=ServeOptions(
                no_auth=no_auth,
                allow_hosts=tuple(allow_host or ()),
                allow_control_text=allow_control_text,
                silence_seconds=hang_after,
                step_seconds=step_seconds,
                load_seconds=load_seconds,
                request_seconds=request_seconds,
                drain_seconds=drain_seconds,
                preload=preload,
                keeps_devices=keeps_devices(opened),
            ),
        )
    except interrupts.Stop as stop:
        # SIGTERM before the server listens for it: nothing was asked of it yet, and no work is left.
        if stop.error is not interrupts.SIGTERM:
            raise


def emit_ready(fields: dict[str, object]) -> None:
    """The server's one line on stdout."""
    import json

    sys.stdout.write(json.dumps({"schema": 1, **fields}) + "\n")
    sys.stdout.flush()


def chat(
    target: Annotated[str, typer.Argument(metavar="PORT|URL", help="A port's folder or a URL.")],
    once: Annotated[str | None, typer.Option(help="Print the answer to this and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = False,
) -> None:
    """Chat in the terminal with a port or a server."""
    from gemma_neuron.pipeline import open_port, runner_factory
    from gemma_neuron.serving.terminal import run_chat

    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: an answer has at least one.", "Leave it out.")
    if temperature is not None and not 0 <= temperature <= 2:
        raise UsageError(f"--temperature {temperature}: give 0 to 2.", "0 is greedy.")
    remote = target.startswith(("http://", "https://"))
    opened = None if remote else open_port(Path(target), notice)
    run_chat(
        target if opened is None else opened,
        None if opened is None else runner_factory(opened),
        once=once,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        enable_thinking=thinking,
    )
