"""`doctor` and `demo`: this machine, and the whole way on the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemma_neuron.commands.options import BucketOwner, Json, Tp
from gemma_neuron.commands.port import run_compile, validate
from gemma_neuron.commands.serving import chat
from gemma_neuron.commands.spot import account_and_regions, type_names
from gemma_neuron.commands.spot_options import (
    DEFAULT_REGIONS,
    InstanceProfile,
    Regions,
    Types,
)
from gemma_neuron.render import emit_json, emit_lines


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
    run_compile(str(demo_folder()), request, as_json=False)
    code = validate(out)
    if code == 0:
        question = demo_question()
        emit_lines([f"> {question}"])
        chat(str(out), once=question)
    return code


def doctor(
    aws: Annotated[
        bool, typer.Option("--aws", help="Look at the AWS account too: quota, rights, bucket.")
    ] = False,
    mirror: Annotated[
        str, typer.Option("--mirror", help="With --aws: the bucket, s3://bucket/prefix.")
    ] = "",
    bucket_owner: BucketOwner = "",
    regions: Regions = DEFAULT_REGIONS,
    types: Types = "inf2.24xlarge",
    instance_profile: InstanceProfile = "gemma-neuron",
    as_json: Json = False,
) -> int:
    """Look at this machine: back ends, compiler, memory, disk; with --aws at what `spot launch` needs."""
    from gemma_neuron.doctor import examine, examine_aws
    from gemma_neuron.render.port import show_checks

    checks = examine()
    if aws:
        _, names = account_and_regions(regions, 60.0)
        checks += examine_aws(names, type_names(types), instance_profile, mirror, bucket_owner)
    if as_json:
        emit_json({"checks": checks})
    else:
        show_checks(checks)
    return 8 if any(check["status"] == "fail" for check in checks) else 0
