"""The flags of `tune` and `merge`, one alias each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron.names import path_of

Option = typer.Option
MOST_STEPS = 99_999_999
MOST_SAMPLES = 1_000_000
MOST_PROCESSES = 1024
"""Replicas, and threads of one: far above any machine, far below what libraries crash on."""
LONGEST_WAIT = 86_400.0
Data = Annotated[
    Path, Option("--data", parser=path_of, help="Conversations: a JSON object of messages a line.")
]
AdapterOut = Annotated[
    Path, Option("--out", parser=path_of, help="The adapter's folder: new, or one to go on with.")
]
AdapterIn = Annotated[
    Path, typer.Argument(parser=path_of, metavar="ADAPTER", help="A LoRA adapter's folder.")
]
MergedOut = Annotated[
    Path, Option("--out", parser=path_of, help="The merged checkpoint: a new folder.")
]
Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        min=1,
        max=MOST_PROCESSES,
        help="Workers; default: one a CUDA device, else one a machine.",
    ),
]
Threads = Annotated[
    int | None,
    Option(
        "--threads",
        min=1,
        max=MOST_PROCESSES,
        help="Of each replica; default: its share of the cores.",
    ),
]
Epochs = Annotated[float, Option("--epochs", min=0.0, max=1e6, help="Times to go over the data.")]
Steps = Annotated[
    int | None, Option("--steps", min=1, max=MOST_STEPS, help="Optimiser steps, not --epochs.")
]
Batch = Annotated[int, Option("--batch", min=1, max=MOST_SAMPLES, help="Samples a step.")]
LearningRate = Annotated[
    float, Option("--learning-rate", min=1e-12, max=1e3, help="The largest; it decays.")
]
Rank = Annotated[int, Option("--rank", min=1, help="Rank of the LoRA factors.")]
Alpha = Annotated[int | None, Option("--alpha", min=1, max=2**20, help="Default: twice the rank.")]
Targets = Annotated[
    str | None, Option("--targets", help="Projections, e.g. q_proj,v_proj; default: all seven.")
]
Dropout = Annotated[float, Option("--dropout", min=0.0, max=0.99, help="Of the factors' input.")]
Seed = Annotated[
    int,
    Option(
        "--seed",
        min=-(2**63),
        max=2**63 - 1,
        help="Of the first factors and the order of the data.",
    ),
]
TuneDtype = Annotated[str, Option("--dtype", help="Of the base: float32 or bfloat16.")]
MaxLength = Annotated[
    str | None, Option("--max-length", help="Tokens a sample may have, e.g. 2k (the default).")
]
SaveEvery = Annotated[int, Option("--save-every", min=1, help="Steps between checkpoints.")]
Keep = Annotated[int, Option("--keep", min=1, help="Checkpoints to keep.")]
Elastic = Annotated[
    str, Option("--elastic", help="pause: wait for a lost replica; resize: go on without it.")
]
MinReplicas = Annotated[
    int | None, Option("--min-replicas", min=1, help="With resize: the fewest; default 1.")
]
RegrowAfter = Annotated[
    float,
    Option(
        "--regrow-after",
        min=0.0,
        max=LONGEST_WAIT,
        help="With resize: seconds a lost place stays empty.",
    ),
]
HangAfter = Annotated[
    float,
    Option(
        "--hang-after",
        min=1.0,
        max=LONGEST_WAIT,
        help="Seconds without a sign of life that are a hang.",
    ),
]
MaxFailures = Annotated[
    int, Option("--max-failures", min=0, help="Lost replicas to bear with no commit between.")
]
Cluster = Annotated[
    str | None,
    Option(
        "--cluster",
        metavar="ADDRESS",
        help="Train on the machines of a Ray cluster: auto or HOST:PORT.",
    ),
]
Device = Annotated[str, Option("--device", help="auto, cpu or cuda.")]
Report = Annotated[
    Path | None,
    Option("--report", help="Also write the loss, the faults and the recipe as one HTML page."),
]
