"""Flags of `spot` and of `doctor --aws`, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_REGIONS = "us-east-1,us-east-2,us-west-2"
Regions = Annotated[
    str, typer.Option("--regions", help="Regions, e.g. us-east-1,us-west-2, or all.")
]
Types = Annotated[
    str, typer.Option("--types", help="Instance types, e.g. inf2.24xlarge,inf2.48xlarge.")
]
InstanceProfile = Annotated[
    str, typer.Option("--instance-profile", help="With the rights of examples/iam-policy.json.")
]
CallTimeout = Annotated[
    float,
    typer.Option("--call-timeout", min=0.1, help="Seconds until a call's answer counts as lost."),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.0, help="Minutes until exit 9; default: no end."),
]
MaxPrice = Annotated[
    float | None, typer.Option("--max-price", min=0.0, help="US dollars an hour at most.")
]
MirrorUri = Annotated[
    str, typer.Option("--mirror", help="s3://bucket/prefix: where the port goes.")
]
Apply = Annotated[
    bool, typer.Option("--apply", help="Buy. Without it only says what would be done.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")]
MaxHours = Annotated[
    float, typer.Option("--max-hours", min=0.1, help="After which a box ends itself.")
]
OnDemandAfter = Annotated[
    float | None,
    typer.Option(
        "--on-demand-after", min=0.0, help="Minutes of waiting after which to pay on demand."
    ),
]
Poll = Annotated[float, typer.Option("--poll", min=0.01, help="Seconds between rounds.")]
MinScore = Annotated[
    int | None, typer.Option("--min-score", min=1, max=10, help="Placement score needed too.")
]
Ami = Annotated[
    str, typer.Option("--ami", help="Image; default: AWS's public Neuron image of the region.")
]
Subnets = Annotated[
    str, typer.Option("--subnets", help="Subnets, of any regions; default: each zone's own.")
]
Toolkit = Annotated[
    str, typer.Option("--toolkit", help="What boxes install, pinned; default: this version.")
]
HubToken = Annotated[
    str,
    typer.Option(
        "--hf-token-parameter", help="SSM parameter with the hub's token, for gated models."
    ),
]
