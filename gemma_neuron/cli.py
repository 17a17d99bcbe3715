"""The command line: which commands there are, and the exit code of each end. Flags are in `commands`.

Nothing heavy is imported at start: each command imports what it calls, so that `--help`, `plan` and `inspect` start
without torch. Exit codes are those of `errors.py`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gemma_neuron import interrupts
from gemma_neuron.commands import (
    bench,
    checkpoint,
    machine,
    mirroring,
    port,
    serving,
    spot,
    tuning,
)
from gemma_neuron.errors import (
    Cancelled,
    EnvironmentProblem,
    GemmaNeuronError,
    UsageError,
)
from gemma_neuron.logs import LogFormat, choose, to_stderr
from gemma_neuron.render import emit_json, emit_lines, show_error

READER_WENT_AWAY = 141
"""As shells say of a program that SIGPIPE ended: 128 and its number."""
EXIT_HELP = """Exit codes: 0 done · 1 bug · 2 usage · 3 checkpoint · 4 plan · 5 integrity · 6 compile ·
7 validation · 8 environment · 9 no capacity · 10 quota · 75 interrupted, run again · 130 Ctrl-C"""
app = typer.Typer(
    name="gemma-neuron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "GEMMA_NEURON"},
    epilog=EXIT_HELP,
)


@app.callback()
def options(
    log_format: Annotated[
        LogFormat, typer.Option(help="Of stderr: lines, or a JSON object each.")
    ] = "text",
) -> None:
    """Ports Google's Gemma to AWS Inferentia2, or says exactly what is wrong."""
    choose(log_format)


app.command()(checkpoint.inspect)
app.command()(checkpoint.plan)
app.command()(port.shard)
app.command()(checkpoint.golden)
app.command(name="compile")(port.compile_command)
app.command()(port.validate)
app.command(name="serve-local")(serving.serve_local)
app.command()(serving.chat)
app.command()(bench.bench)
app.command()(tuning.tune)
app.command()(tuning.merge)
app.add_typer(mirroring.app, name="mirror")
app.add_typer(spot.app, name="spot")
app.command()(machine.demo)
app.command()(machine.doctor)


def main() -> NoReturn:
    """Run the command line and exit with the code of `errors.py`."""
    from typer.exceptions import Abort, Exit

    wants_json = "--json" in sys.argv
    _require_streams()
    to_stderr()
    interrupts.hear_signals()
    if sys.argv[1:] == [
        "--version"
    ]:  # as an option it could be set by GEMMA_NEURON_VERSION, and no command would run
        emit_lines([f"gemma-neuron {importlib.metadata.version('gemma-neuron')}"])
        sys.exit(0)
    try:
        code = _run(wants_json)
    except Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, Abort):
        code = _cancelled(wants_json)
    except interrupts.Stop as stop:
        code = _fail(stop.error, wants_json)
    except GemmaNeuronError as error:
        code = _fail(error, wants_json)
    except BrokenPipeError:
        code = _reader_went_away()
    except SystemExit as ended:  # Typer's own end for a broken pipe, with the exit code of a bug
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = _reader_went_away()
    except OSError as error:
        text = f"{error.filename or 'The system'}: {error.strerror or error}."
        code = _fail(
            EnvironmentProblem(text, "Check the path, its rights and the disk."), wants_json
        )
    except typer.TyperException as error:
        hint = "Run `gemma-neuron COMMAND --help`."
        code = _fail(UsageError(error.format_message(), hint), wants_json)
    except Exception as error:
        asked = interrupts.asked()
        if asked is None:
            _tell_bug(error, wants_json)
            raise
        code = _fail(asked, wants_json)
    sys.exit(code if isinstance(code, int) else 0)


def _run(as_json: bool) -> object:
    """What the command returned."""
    code = app(standalone_mode=False) or 0
    # Typer's own answer to Ctrl-C, without a word
    return _cancelled(as_json) if code == Cancelled.exit_code else code


def _tell_bug(error: Exception, as_json: bool) -> None:
    if as_json:
        emit_json({"error": GemmaNeuronError(f"{type(error).__name__}: {error}").to_json()})


def _require_streams() -> None:
    """A process may be started without standard streams: results have nowhere to go then, notices may be lost."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # it lasts as long as the process
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        problem = "Standard output is closed: there is nowhere to write results to."
        sys.exit(
            _fail(EnvironmentProblem(problem, "Redirect it to a file or to /dev/null."), False)
        )


def _drop_output() -> None:
    """What Python would still flush to standard output at its end goes nowhere."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_went_away() -> int:
    """`| head` has read enough."""
    _drop_output()
    return READER_WENT_AWAY


def _fail(error: GemmaNeuronError, as_json: bool) -> int:
    try:
        show_error(error, as_json)
    except OSError:  # standard output is full or gone; the message stands on stderr already
        _drop_output()
    return error.exit_code


def _cancelled(as_json: bool) -> int:
    return _fail(interrupts.CTRL_C, as_json)


if __name__ == "__main__":
    main()
