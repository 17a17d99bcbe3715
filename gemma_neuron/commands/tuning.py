"""`tune` and `merge`: an adapter trained, and an adapter into its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from gemma_neuron import settings
from gemma_neuron.commands import tune_options as flags
from gemma_neuron.commands.options import (
    BucketOwner,
    Json,
    Mirror,
    MirrorGrace,
    MirrorOnlyWriter,
    SourceArg,
    mirror_options,
)
from gemma_neuron.render import emit_json, emit_lines, notice

if TYPE_CHECKING:
    from gemma_neuron.pipeline.tuning import TuneRequest


def tune(
    source: SourceArg,
    data: flags.Data,
    out: flags.AdapterOut,
    replicas: flags.Replicas = None,
    threads: flags.Threads = None,
    epochs: flags.Epochs = 3.0,
    steps: flags.Steps = None,
    batch: flags.Batch = 8,
    learning_rate: flags.LearningRate = 2e-4,
    rank: flags.Rank = 8,
    alpha: flags.Alpha = None,
    targets: flags.Targets = None,
    dropout: flags.Dropout = 0.0,
    seed: flags.Seed = 0,
    dtype: flags.TuneDtype = "float32",
    max_length: flags.MaxLength = None,
    save_every: flags.SaveEvery = 20,
    keep: flags.Keep = 3,
    elastic: flags.Elastic = "pause",
    min_replicas: flags.MinReplicas = None,
    regrow_after: flags.RegrowAfter = 10.0,
    hang_after: flags.HangAfter = 10.0,
    max_failures: flags.MaxFailures = 10,
    device: flags.Device = "auto",
    cluster: flags.Cluster = None,
    mirror: Mirror = None,
    mirror_grace: MirrorGrace = 600.0,
    bucket_owner: BucketOwner = "",
    only_writer: MirrorOnlyWriter = False,
    report: flags.Report = None,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter on conversations, on workers that may die."""
    from gemma_neuron.pipeline.tuning import TuneRequest
    from gemma_neuron.tuning.recipe import PROJECTIONS

    mode = settings.choice(elastic, "--elastic", ("pause", "resize"))
    request = TuneRequest(
        data=data,
        out=out,
        replicas=replicas,
        threads=threads,
        device=device,
        epochs=epochs,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        rank=rank,
        alpha=alpha,
        targets=PROJECTIONS
        if targets is None
        else tuple(name.strip() for name in targets.split(",")),
        dropout=dropout,
        seed=seed,
        dtype=settings.choice(dtype, "--dtype", ("float32", "bfloat16")),
        max_length=settings.count(max_length, "--max-length"),
        save_every=save_every,
        keep=keep,
        elastic=cast("Literal['pause', 'resize']", mode),
        min_replicas=min_replicas,
        regrow_after=regrow_after,
        hang_after=hang_after,
        max_failures=max_failures,
        cluster=cluster,
        mirror=mirror_options(mirror, mirror_grace, bucket_owner, only_writer),
    )
    run_tune(source, request, report, as_json)


def run_tune(source: str, request: TuneRequest, report: Path | None, as_json: bool) -> None:
    """Run it, and write the report however it ends."""
    from gemma_neuron.render.page import require_page

    if report is not None:
        require_page(report)
    from gemma_neuron.pipeline.tuning import tuned
    from gemma_neuron.render import Ticker
    from gemma_neuron.render.download import Download
    from gemma_neuron.render.page.tuning import write_tune_page
    from gemma_neuron.render.tuning import lines
    from gemma_neuron.tuning.record import RECORD_NAME
    from gemma_neuron.tuning.story import read_story

    ticker = Ticker()
    try:
        found = tuned(
            source,
            request,
            notice=notice,
            reading=ticker,
            look=lambda where: ticker(str(where)),
            watch=Download(),
        )
    finally:
        ticker.close()
        if report is not None and (request.out / RECORD_NAME).is_file():
            write_tune_page(read_story(request.out), report)
            notice(f"report: {report}")
    if as_json:
        emit_json(found.to_json())
    else:
        emit_lines(lines(found))


def merge(
    source: SourceArg,
    adapter: flags.AdapterIn,
    out: flags.MergedOut,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint with an adapter added to the tensors it changes, all others byte for byte."""
    from gemma_neuron.pipeline import merged_checkpoint
    from gemma_neuron.render import Ticker
    from gemma_neuron.render.download import Download

    ticker = Ticker()
    merged = merged_checkpoint(source, adapter, out, ticker, Download())
    ticker.close()
    if as_json:
        emit_json(merged.to_json())
    else:
        emit_lines(
            [f"merged into {merged.out}: {merged.changed} tensors changed, {merged.copied} copied"]
        )
