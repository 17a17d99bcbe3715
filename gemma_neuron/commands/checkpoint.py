"""`inspect`, `plan`, `golden`: what can be said of a checkpoint alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from gemma_neuron import settings
from gemma_neuron.commands.options import (
    Base,
    Buckets,
    Context,
    HostMemory,
    Json,
    Slots,
    SourceArg,
    StrategyOption,
    Tp,
)
from gemma_neuron.render import emit_json, emit_lines, notice

if TYPE_CHECKING:
    from gemma_neuron.sharding.candidates import StrategyChoice


def inspect(
    source: SourceArg,
    values: Annotated[bool, typer.Option("--values", help="Stream all bytes too.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor and what becomes of it.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Audit a checkpoint, or a port's rank files: every tensor accounted for, buffers, template, stop ids."""
    from gemma_neuron.pipeline import inspected
    from gemma_neuron.render.audit import show_audit
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.progress import ByteProgress

    with ByteProgress("values") as progress:
        report = inspected(source, values=values, progress=progress, watch=Download())
    if as_json:
        emit_json(report.to_json())
    else:
        show_audit(report, tensors)
    return 3 if report.errors else 0


def plan(
    source: SourceArg,
    tp: Tp = 8,
    instance: Annotated[str, typer.Option(help="Instance type.")] = "inf2.24xlarge",
    max_context: Context = None,
    strategy: StrategyOption = "auto",
    slots: Slots = "1",
    buckets: Buckets = None,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """Lay the model over ranks, layer by layer, and price the ways. Needs config.json only."""
    from gemma_neuron.pipeline import PlanOptions, planned
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.plan import show_plan

    options = PlanOptions(
        tp=tp,
        instance=instance,
        strategy=cast("StrategyChoice", strategy),
        max_context=settings.count(max_context, "--max-context"),
        slots=settings.count(slots, "--slots"),
        buckets=settings.counts(buckets, "--buckets"),
        host_memory=settings.size(host_memory, "--host-memory"),
    )
    result = planned(source, options, Download())
    if as_json:
        emit_json(result.to_json())
    else:
        show_plan(result)


def golden(
    source: SourceArg,
    out: Annotated[Path, typer.Option("--out", help="The golden: a .safetensors file.")],
    prompts: Annotated[Path | None, typer.Option(help="A question file (TOML).")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    host_memory: Annotated[
        str | None, typer.Option(help="What it may use, e.g. 16GB; default: what is free.")
    ] = None,
    base: Base = False,
    as_json: Json = False,
) -> None:
    """Make a reference by stock transformers, for `validate --golden` on any machine."""
    from gemma_neuron.pipeline import golden_file
    from gemma_neuron.render import Ticker
    from gemma_neuron.render.download import Download
    from gemma_neuron.validation.export import GoldenOptions

    ticker = Ticker()
    made = golden_file(
        source,
        GoldenOptions(
            out=out,
            dtype=dtype,
            questions=prompts,
            base=base,
            memory=settings.size(host_memory, "--host-memory"),
        ),
        notice=notice,
        progress=ticker,
        watch=Download(),
    )
    ticker.close()
    if as_json:
        emit_json(made.to_json())
    else:
        emit_lines([f"{made.file}: {made.prompts} prompts, {made.seconds:.0f} s"])
