"""Flags and arguments that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemma_neuron.names import path_of

if TYPE_CHECKING:
    from gemma_neuron.mirror.background import MirrorOptions

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
SourceArg = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Checkpoint: a folder, a hub id org/name[@revision], or s3://bucket/prefix.",
    ),
]

PortArg = Annotated[Path, typer.Argument(metavar="PORT", parser=path_of, help="A port's folder.")]
Out = Annotated[
    Path,
    typer.Option("--out", parser=path_of, help="The port's folder: new, or one to go on with."),
]
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
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory", help="Host memory to stay within, e.g. 384GB; default: all but a reserve."
    ),
]
Mirror = Annotated[
    str | None,
    typer.Option("--mirror", help="s3://bucket/prefix: upload each part as soon as it is made."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        help="Compile on the machines of a Ray cluster: auto or HOST:PORT. Needs --mirror.",
    ),
]
MirrorGrace = Annotated[
    float,
    typer.Option("--mirror-grace", min=0.0, help="Seconds the end may wait for uploads."),
]
MirrorOnlyWriter = Annotated[
    bool,
    typer.Option(
        "--mirror-only-writer",
        help="No other machine writes there: for stores that ignore conditions on writes.",
    ),
]
MirrorRaw = Annotated[
    bool,
    typer.Option(
        "--mirror-raw/--no-mirror-raw",
        help="Also upload the checkpoint, if SOURCE is a folder: it is put back when its machine is gone.",
    ),
]
BucketOwner = Annotated[
    str, typer.Option("--bucket-owner", help="AWS account that must own the bucket.")
]
ExpectDigest = Annotated[
    str | None,
    typer.Option(
        "--expect-digest",
        help="Digest, as compile and mirror pull print it, of the only port that will do.",
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="cpu or neuron; default: what doctor would name."),
]
Base = Annotated[
    bool, typer.Option("--base", help="A base model: plain completion, no chat template needed.")
]


def mirror_options(
    uri: str | None, grace: float, bucket_owner: str, only_writer: bool, *, raw: bool = True
) -> MirrorOptions | None:
    """What `--mirror` and its companions ask for. Raises UsageError."""
    if uri is None:
        return None
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.mirror.location import S3Location

    S3Location.parse(uri)
    return MirrorOptions(
        uri=uri, grace=grace, bucket_owner=bucket_owner, only_writer=only_writer, raw=raw
    )
