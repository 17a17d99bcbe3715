"""`merge`: an adapter into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron.commands.options import Json, SourceArg
from gemma_neuron.render import emit_json, emit_lines


def merge(
    source: SourceArg,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A LoRA adapter's folder.")],
    out: Annotated[Path, typer.Option("--out", help="The merged checkpoint: a new folder.")],
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
