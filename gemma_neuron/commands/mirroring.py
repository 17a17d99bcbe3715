"""`mirror push|pull|verify|status`: a port moved to and from a bucket by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron import settings
from gemma_neuron.commands.options import (
    BucketOwner,
    ExpectDigest,
    Json,
    MirrorGrace,
    MirrorOnlyWriter,
    MirrorRaw,
    PortArg,
)
from gemma_neuron.render import emit_json, emit_lines, notice
from gemma_neuron.render.progress import ByteProgress

app = typer.Typer(
    no_args_is_help=True, help="Move a port to and from S3, and check what lies there."
)
Uri = Annotated[str, typer.Argument(metavar="URI", help="s3://bucket/prefix, as given to compile.")]
PortId = Annotated[
    str, typer.Option("--port-id", help="Which port under the prefix; default: PORT's own.")
]


@app.command()
def push(
    port: PortArg,
    uri: Uri,
    grace: MirrorGrace = 86_400.0,
    bucket_owner: BucketOwner = "",
    only_writer: MirrorOnlyWriter = False,
    raw: MirrorRaw = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read what is there, and write over objects whose bytes are wrong."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload what the bucket lacks of a port; a killed run goes on."""
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.pipeline import mirroring
    from gemma_neuron.render.mirror import pushed

    options = MirrorOptions(
        uri=uri,
        grace=grace,
        bucket_owner=bucket_owner,
        only_writer=only_writer,
        raw=raw,
        contents=verify,
    )
    counts, owner = mirroring.push(port, options, notice)
    fields, lines = pushed(counts, owner)
    emit_json(fields) if as_json else emit_lines(lines)


@app.command()
def pull(
    port: PortArg,
    uri: Uri,
    port_id: PortId = "",
    bucket_owner: BucketOwner = "",
    expect_digest: ExpectDigest = None,
    as_json: Json = False,
) -> int:
    """Download a port, or what is missing of it; every file is checked against its digest."""
    from gemma_neuron.pipeline import mirroring
    from gemma_neuron.port import Port
    from gemma_neuron.render.mirror import pulled

    expected = settings.digest(expect_digest, "--expect-digest")
    store = mirroring.store_of(uri, port, port_id, bucket_owner)
    with ByteProgress("mirror") as progress:
        counts = mirroring.pull(
            port, store, notice, lambda count: progress(count, "pull"), expected
        )
    digest = "" if counts.bad else Port(port).contents_digest()
    fields, lines = pulled(counts, port, digest)
    emit_json(fields) if as_json else emit_lines(lines)
    return 5 if counts.bad else 0


@app.command()
def verify(
    port: PortArg,
    uri: Uri,
    port_id: PortId = "",
    bucket_owner: BucketOwner = "",
    as_json: Json = False,
) -> int:
    """Read every object of a port in the bucket and compare it with its manifest (exit 5 on a difference)."""
    return _check(port, uri, port_id, bucket_owner, as_json, contents=True)


@app.command()
def status(
    port: PortArg,
    uri: Uri,
    port_id: PortId = "",
    bucket_owner: BucketOwner = "",
    as_json: Json = False,
) -> int:
    """Who writes, and which parts are there; reads no contents."""
    return _check(port, uri, port_id, bucket_owner, as_json, contents=False)


def _check(
    port: Path, uri: str, port_id: str, bucket_owner: str, as_json: bool, *, contents: bool
) -> int:
    from gemma_neuron.pipeline import mirroring
    from gemma_neuron.render.mirror import checked

    store = mirroring.store_of(uri, port, port_id, bucket_owner)
    with ByteProgress("mirror") as progress:
        found = mirroring.checked(store, lambda count: progress(count, "verify"), contents=contents)
    fields, lines = checked(found, str(store.location))
    emit_json(fields) if as_json else emit_lines(lines)
    return 5 if found.bad else 0
