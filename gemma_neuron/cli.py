"""The command line: parse, call one function, render, exit code. The only place that knows flags.

Nothing heavy is imported here: each command imports what it calls, so that `--help`, `plan` and `inspect` start
without torch. Exit codes are those of `errors.py`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from gemma_neuron import settings
from gemma_neuron.errors import (
    Cancelled,
    EnvironmentProblem,
    GemmaNeuronError,
    Interrupted,
    UsageError,
)
from gemma_neuron.render import emit_json, emit_lines, notice, show_error

if TYPE_CHECKING:
    from gemma_neuron.pipeline import CompileRequest
    from gemma_neuron.sharding.planner import StrategyChoice

EXIT_HELP = """Exit codes: 0 done · 1 bug · 2 usage · 3 checkpoint · 4 plan · 5 integrity · 6 compile ·
7 validation · 8 environment · 75 interrupted, run again · 130 Ctrl-C"""
app = typer.Typer(
    name="gemma-neuron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "GEMMA_NEURON"},
    help="Ports Google's Gemma to AWS Inferentia2, or says exactly what is wrong.",
    epilog=EXIT_HELP,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
SourceArg = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder.")]
PortArg = Annotated[Path, typer.Argument(metavar="PORT", help="A port's folder.")]
Out = Annotated[Path, typer.Option("--out", help="The port's folder: new, or one to go on with.")]
Tp = Annotated[int, typer.Option("--tp", help="Tensor parallel degree.")]
StrategyOption = Annotated[
    str, typer.Option("--strategy", help="auto, replicate-kv or replicate-global.")
]
Context = Annotated[
    str | None, typer.Option("--max-context", help="Positions a sequence may have, e.g. 32k.")
]
Slots = Annotated[str | None, typer.Option("--slots", help="Sequences decoded at once.")]
Buckets = Annotated[
    str | None, typer.Option("--buckets", help="Prefill lengths to compile, e.g. 128,512.")
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="cpu or neuron; default: what doctor would name."),
]
Base = Annotated[
    bool, typer.Option("--base", help="A base model: plain completion, no chat template needed.")
]


def main() -> NoReturn:
    """Run the command line and exit with the code of `errors.py`."""
    from typer.exceptions import Abort, Exit

    wants_json = "--json" in sys.argv
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        code = app(standalone_mode=False) or 0
    except Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, Abort):
        code = _fail(Cancelled("Stopped by Ctrl-C.", "Run the same command to go on."), wants_json)
    except GemmaNeuronError as error:
        code = _fail(error, wants_json)
    except OSError as error:
        text = f"{error.filename or 'The system'}: {error.strerror or error}."
        code = _fail(
            EnvironmentProblem(text, "Check the path, its rights and the disk."), wants_json
        )
    except typer.TyperException as error:
        hint = "Run `gemma-neuron COMMAND --help`."
        code = _fail(UsageError(error.format_message(), hint), wants_json)
    except Exception as error:
        if wants_json:
            emit_json({"error": GemmaNeuronError(f"{type(error).__name__}: {error}").to_json()})
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: GemmaNeuronError, as_json: bool) -> int:
    show_error(error, as_json)
    return error.exit_code


def _interrupted(number: int, frame: object) -> NoReturn:
    """SIGTERM with work left: what is committed stays, the rest is dropped, exit 75."""
    raise Interrupted("Stopped by SIGTERM with work left.", "Run the same command to go on.")


@app.command()
def inspect(
    source: SourceArg,
    values: Annotated[bool, typer.Option("--values", help="Stream all bytes too.")] = False,
    as_json: Json = False,
) -> int:
    """Audit a checkpoint: every tensor accounted for, buffers, template, stop ids."""
    from gemma_neuron.checkpoint.audit import audit
    from gemma_neuron.checkpoint.source import open_source
    from gemma_neuron.render import show_audit

    report = audit(open_source(source), values=values)
    if as_json:
        emit_json(report.to_json())
    else:
        show_audit(report)
    return 3 if report.errors else 0


@app.command()
def plan(
    source: SourceArg,
    tp: Tp = 8,
    instance: Annotated[str, typer.Option(help="Instance type.")] = "inf2.24xlarge",
    max_context: Context = None,
    strategy: StrategyOption = "auto",
    slots: Slots = "1",
    buckets: Buckets = None,
    as_json: Json = False,
) -> None:
    """Lay the model over ranks, layer by layer, and price the ways. Needs config.json only."""
    from gemma_neuron.pipeline import planned
    from gemma_neuron.render import show_plan

    result = planned(
        source,
        tp=tp,
        instance=instance,
        max_context=settings.count(max_context, "--max-context"),
        slots=settings.count(slots, "--slots"),
        buckets=settings.counts(buckets, "--buckets"),
        strategy=cast("StrategyChoice", strategy),
    )
    if as_json:
        emit_json(result.to_json())
    else:
        show_plan(result)


@app.command()
def shard(
    source: SourceArg,
    out: Out,
    tp: Tp,
    strategy: StrategyOption = "auto",
    base: Base = False,
    as_json: Json = False,
) -> None:
    """Write one weight file a rank, streaming; a killed run goes on where it stopped."""
    from gemma_neuron.pipeline import CompileRequest
    from gemma_neuron.pipeline import shard as run
    from gemma_neuron.render import ByteProgress, show_port

    request = CompileRequest(
        out=out, backend="", tp=tp, strategy=cast("StrategyChoice", strategy), base=base
    )
    progress = ByteProgress("shard", 0)
    result = run(source, request, progress)
    progress.close()
    if as_json:
        emit_json(result.to_json())
    else:
        show_port(result, "sharded into")


@app.command(name="compile")
def compile_command(
    source: SourceArg,
    out: Out,
    tp: Tp = 8,
    backend: BackendOption = None,
    strategy: StrategyOption = "auto",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    max_context: Context = None,
    slots: Slots = None,
    buckets: Buckets = None,
    base: Base = False,
    as_json: Json = False,
) -> None:
    """Audit, plan, shard and compile; what is committed is reused."""
    from gemma_neuron.doctor import default_backend
    from gemma_neuron.pipeline import CompileRequest

    if backend is None:
        backend = default_backend()
        notice(f"back end: {backend} (doctor's choice for this machine)")
    request = CompileRequest(
        out=out,
        backend=backend,
        tp=tp,
        strategy=cast("StrategyChoice", strategy),
        dtype=dtype,
        max_context=settings.count(max_context, "--max-context"),
        slots=settings.count(slots, "--slots"),
        buckets=settings.counts(buckets, "--buckets"),
        base=base,
    )
    _compile(source, request, as_json)


def _compile(source: str, request: CompileRequest, as_json: bool) -> None:
    from gemma_neuron.pipeline import compile_port
    from gemma_neuron.render import ByteProgress, show_port

    progress = ByteProgress("shard", 0)
    result = compile_port(source, request, progress, notice)
    progress.close()
    if as_json:
        emit_json(result.to_json())
    else:
        show_port(result, "compiled into")


@app.command()
def validate(
    port: PortArg,
    checkpoint: Annotated[
        str | None, typer.Option(help="The source; default: where the port was made from.")
    ] = None,
    golden: Annotated[Path | None, typer.Option(help="A reference made by `golden`.")] = None,
    levels: Annotated[str | None, typer.Option(help="Levels to run, e.g. 0-6.")] = None,
    questions: Annotated[Path | None, typer.Option(help="A question file (TOML).")] = None,
    base: Base = False,
    chat_template: Annotated[
        str | None, typer.Option(help="Force a template file or gemma-3, gemma-4, none.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Judge a port by what it does: prompts, weights, reference, logits, positions, answers."""
    from gemma_neuron.pipeline import validate_port
    from gemma_neuron.render import Ticker
    from gemma_neuron.validation.text import lines
    from gemma_neuron.validation.validator import Options

    ticker = Ticker()
    options = Options(
        golden=golden,
        levels=settings.level_range(levels),
        questions=questions,
        base=base,
        force_template=chat_template,
    )
    report = validate_port(port, checkpoint, options, notice=notice, progress=ticker)
    ticker.close()
    if as_json:
        emit_json(report.to_json())
    else:
        emit_lines(lines(report))
    return 0 if report.verdict == "works" else 7


@app.command()
def golden(
    source: SourceArg,
    out: Annotated[Path, typer.Option("--out", help="The golden: a .safetensors file.")],
    prompts: Annotated[Path | None, typer.Option(help="A question file (TOML).")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Make a reference by stock transformers, for `validate --golden` on any machine."""
    from gemma_neuron.pipeline import golden_file
    from gemma_neuron.render import Ticker

    ticker = Ticker()
    made = golden_file(source, out=out, dtype=dtype, questions=prompts, notice=ticker)
    ticker.close()
    if as_json:
        emit_json(made.to_json())
    else:
        emit_lines([f"{made.file}: {made.prompts} prompts, {made.seconds:.0f} s"])


@app.command(name="serve-local")
def serve_local(
    port: PortArg,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    unvalidated: Annotated[bool, typer.Option(help="Serve whatever the verdict.")] = False,
    no_auth: Annotated[bool, typer.Option(help="No key beyond loopback.")] = False,
    allow_control_text: Annotated[
        bool, typer.Option(help="Let messages spell control tokens.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Replicas; this version serves one.")] = 1,
    as_json: Json = False,
) -> None:
    """Serve a validated port: OpenAI's API on loopback."""
    from gemma_neuron.pipeline import open_port, runner_factory
    from gemma_neuron.serving.local import ServeOptions, serve

    if not 0 <= http_port < 2**16:
        raise UsageError(f"--port {http_port} is no port.", "Use 0 to 65535; 0 takes a free one.")
    if replicas != 1:
        raise UsageError(f"--replicas {replicas}: this version serves one.", "Leave it out.")
    opened = open_port(port)
    serve(
        opened,
        runner_factory(opened),
        host=host,
        http_port=http_port,
        unvalidated=unvalidated,
        announce=emit_ready,
        options=ServeOptions(no_auth=no_auth, allow_control_text=allow_control_text),
    )


def emit_ready(fields: dict[str, object]) -> None:
    """The server's one line on stdout."""
    import json

    sys.stdout.write(json.dumps({"schema": 1, **fields}) + "\n")
    sys.stdout.flush()


@app.command()
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
    if temperature is not None and temperature < 0:
        raise UsageError(f"--temperature {temperature} is below 0.", "0 is greedy.")
    remote = target.startswith(("http://", "https://"))
    opened = None if remote else open_port(Path(target))
    run_chat(
        target if opened is None else opened,
        None if opened is None else runner_factory(opened),
        once=once,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        enable_thinking=thinking,
    )


@app.command()
def demo(
    export: Annotated[
        Path | None, typer.Option(help="Only copy the bundled checkpoint there.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The demo's port.")] = Path("demo-port"),
    tp: Tp = 8,
) -> int:
    """Port the bundled Gemma 4 model, validate it and ask it one question."""
    from gemma_neuron.demo import demo_folder, demo_question, export_demo
    from gemma_neuron.pipeline import CompileRequest

    if export is not None:
        emit_lines([f"copied {name}" for name in export_demo(export)])
        return 0
    request = CompileRequest(out=out, backend="cpu", tp=tp, max_context=1024)
    _compile(str(demo_folder()), request, as_json=False)
    code = validate(out)
    if code == 0:
        question = demo_question()
        emit_lines([f"> {question}"])
        chat(str(out), once=question)
    return code


@app.command()
def doctor(as_json: Json = False) -> int:
    """Look at this machine: back ends, compiler, memory, disk."""
    from gemma_neuron.doctor import examine
    from gemma_neuron.render import show_checks

    checks = examine()
    if as_json:
        emit_json({"checks": checks})
    else:
        show_checks(checks)
    return 8 if any(check["status"] == "fail" for check in checks) else 0


if __name__ == "__main__":
    main()
