"""`shard`, `compile`, `validate`: a port made and judged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from gemma_neuron import settings
from gemma_neuron.commands.options import (
    BackendOption,
    Base,
    BucketOwner,
    Buckets,
    Cluster,
    Context,
    ExpectDigest,
    HostMemory,
    Json,
    Mirror,
    MirrorGrace,
    MirrorOnlyWriter,
    MirrorRaw,
    Out,
    PortArg,
    Slots,
    SourceArg,
    StrategyOption,
    Tp,
    mirror_options,
)
from gemma_neuron.errors import GemmaNeuronError, UsageError
from gemma_neuron.render import emit_json, emit_lines, notice, show_error

if TYPE_CHECKING:
    from gemma_neuron.pipeline import CompileRequest
    from gemma_neuron.pipeline.tasks import TaskOptions
    from gemma_neuron.reports import ValidationReport
    from gemma_neuron.sharding.candidates import StrategyChoice


def shard(
    source: SourceArg,
    out: Out,
    tp: Tp,
    strategy: StrategyOption = "auto",
    base: Base = False,
    verify: Annotated[
        bool,
        typer.Option(help="Put the ranks together again and compare them with the checkpoint."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one weight file a rank, streaming; a killed run goes on where it stopped."""
    from gemma_neuron.pipeline import CompileRequest
    from gemma_neuron.pipeline import shard as run
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.port import show_port
    from gemma_neuron.render.progress import ByteProgress

    request = CompileRequest(
        out=out, backend="", tp=tp, strategy=cast("StrategyChoice", strategy), base=base
    )
    with ByteProgress() as progress:
        result = run(source, request, progress, notice, Download(), verify=verify)
    if as_json:
        emit_json(result.to_json())
    else:
        show_port(result, "sharded into")


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
    layout: Annotated[
        bool, typer.Option(help="Let the compiler choose the weights' layout (neuron).")
    ] = True,
    stall_after: Annotated[
        float, typer.Option(min=0.1, help="Seconds without output and work that count as a stall.")
    ] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only write graphs and compiler flags to --out.")
    ] = False,
    host_memory: HostMemory = None,
    mirror: Mirror = None,
    mirror_grace: MirrorGrace = 600.0,
    bucket_owner: BucketOwner = "",
    only_writer: MirrorOnlyWriter = False,
    mirror_raw: MirrorRaw = True,
    expect_digest: ExpectDigest = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Audit, plan, shard and compile; what is committed is reused."""
    from gemma_neuron.backends.base import Limits
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
        layout=layout,
        limits=Limits(stall_seconds=stall_after),
        host_memory=settings.size(host_memory, "--host-memory"),
        mirror=mirror_options(mirror, mirror_grace, bucket_owner, only_writer, raw=mirror_raw),
        expect_digest=settings.digest(expect_digest, "--expect-digest"),
        cluster=cluster,
    )
    if dry_run:
        show_dry_run(source, request, as_json)
    else:
        run_compile(source, request, as_json)


def show_dry_run(source: str, request: CompileRequest, as_json: bool) -> None:
    from gemma_neuron.pipeline.dry_run import dry_run
    from gemma_neuron.render.download import Download

    files = dry_run(source, request, Download())
    if as_json:
        emit_json({"folder": str(request.out), "files": list(files)})
    else:
        emit_lines([str(request.out / name) for name in files])


def run_compile(source: str, request: CompileRequest, as_json: bool) -> None:
    from gemma_neuron.pipeline import compile_port
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.port import show_port
    from gemma_neuron.render.progress import ByteProgress

    with ByteProgress() as progress:
        result = compile_port(source, request, progress, notice, Download())
    if as_json:
        emit_json(result.to_json())
    else:
        show_port(result, "compiled into")


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
    drift: Annotated[
        bool, typer.Option("--drift", help="Name the first layer whose hidden state parts.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Also write all of it as one HTML page (extra `report`)."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Also serve it to lm-eval (extra `eval`): task names, with commas."),
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many questions of each task.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Judge a port by what it does: prompts, weights, reference, logits, positions, answers."""
    from gemma_neuron.render.page import require_page, write_page

    if report is not None:
        require_page(report)
    asked = asked_tasks(tasks, task_limit)
    from gemma_neuron.pipeline import validate_port
    from gemma_neuron.pipeline.tasks import with_tasks
    from gemma_neuron.render import Ticker
    from gemma_neuron.render.download import Download
    from gemma_neuron.validation.text import lines
    from gemma_neuron.validation.validator import Options

    ticker = Ticker()
    options = Options(
        golden=golden,
        levels=_levels(levels, tasks is not None),
        questions=questions,
        base=base,
        force_template=chat_template,
        drift=drift,
    )

    def judge() -> ValidationReport:
        watch = Download()
        return validate_port(port, checkpoint, options, notice=notice, progress=ticker, watch=watch)

    with_them = partial(with_tasks, base=base, progress=ticker)
    found = judge() if asked is None else with_them(judge, port, asked)
    ticker.close()
    unwritten: GemmaNeuronError | None = None
    if report is not None:
        try:
            write_page(found, report)
            notice(f"report: {report}")
        except GemmaNeuronError as error:  # minutes of work are no less worth for it
            unwritten = error
    if as_json:
        emit_json(found.to_json())
    else:
        emit_lines(lines(found))
    if unwritten is not None:
        show_error(unwritten, as_json=False)
        return unwritten.exit_code
    return 0 if found.verdict == "works" else 7


def _levels(text: str | None, with_tasks: bool) -> frozenset[int] | None:
    chosen = settings.level_range(text)
    if chosen is not None and 7 in chosen and not with_tasks:
        raise UsageError(
            f"--levels {text!r}: level 7 runs tasks of lm-eval, and none are named.",
            "Name them with --tasks NAME,NAME, or ask for levels 0 to 6.",
        )
    return chosen


def asked_tasks(names: str | None, limit: int | None) -> TaskOptions | None:
    """What `--tasks` and `--task-limit` ask for, checked before anything long runs. Raises UsageError."""
    if names is None:
        if limit is not None:
            raise UsageError("--task-limit without --tasks.", "Name the tasks: --tasks NAME,NAME.")
        return None
    from gemma_neuron.pipeline.tasks import TaskOptions
    from gemma_neuron.validation.tasks import require_tasks

    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise UsageError("--tasks names no task.", "--tasks gemma_neuron_facts, for example.")
    require_tasks(chosen)
    return TaskOptions(names=chosen, limit=limit)
