"""What a box does when it starts: set its own end, install the toolkit at a pinned version, compile, report, end.

In: a Job. Out: the script, without any secret: the box's rights come from its instance profile.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from gemma_neuron import __version__
from gemma_neuron.errors import UsageError

MOST_BYTES = 16 * 1024
"""EC2's limit of user data, before base64."""
NEURON_PIP_INDEX = "https://pip.repos.neuron.amazonaws.com"
"""Where AWS publishes the Neuron SDK's Python packages (the SDK documentation's install pages)."""
PINNED = re.compile(r"gemma-neuron==[0-9][0-9A-Za-z.!+-]*")
WHEEL = re.compile(r"(https|s3)://[^\s'\"#]+/gemma_neuron-[^\s'\"/#]+\.whl#sha256=([0-9a-f]{64})")
COMMIT = re.compile(r"git\+https://[^\s'\"@#]+@[0-9a-f]{40}")
TOOLKIT = f"gemma-neuron=={__version__}"
TRIES = 20
"""Of the compile on one box: exit 75 without a notice says that the same command goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a box works on. `command`: the arguments of `gemma-neuron`, the same on every box of the job.

    `report`: s3:// URI under which a box leaves its log and exit code. `token_parameter`: name of an SSM
    SecureString with the hub's token, or empty.
    """

    id: str
    command: tuple[str, ...]
    report: str
    max_hours: float
    toolkit: str = TOOLKIT
    token_parameter: str = ""


def require_pinned(toolkit: str) -> str:
    """What pip or S3 will give is the same tomorrow. Raises UsageError."""
    if not any(form.fullmatch(toolkit) for form in (PINNED, WHEEL, COMMIT)):
        raise UsageError(
            f"--toolkit {toolkit!r} is not pinned: every box of a job must run the same toolkit.",
            f"Write {TOOLKIT}, https://….whl#sha256=…, s3://….whl#sha256=…, or git+https://…@<40 hex digits>.",
        )
    return toolkit


def script(job: Job, region: str) -> str:
    """The user data of a box in `region`. Raises UsageError when it is larger than EC2 takes."""
    minutes = max(5, round(job.max_hours * 60))
    bucket, _, prefix = job.report.removeprefix("s3://").partition("/")
    lines = [
        "#!/bin/bash",
        f"# gemma-neuron {__version__}, job {job.id}",
        "set -uo pipefail",
        f'shutdown -h +{minutes} "gemma-neuron: --max-hours"',
        "exec > >(tee -a /var/log/gemma-neuron.log) 2>&1",
        "export HOME=/root PATH=/opt/aws/neuron/bin:$PATH PYTHONUNBUFFERED=1",
        f"export AWS_REGION={shlex.quote(region)} AWS_DEFAULT_REGION={shlex.quote(region)}",
        "bin=/opt/gemma-neuron/bin",
        _report(bucket, prefix, job.id),
        "install() {",
        *(f"  {line}" for line in _install(job.toolkit)),
        "}",
        "installed=1",
        "for wait in 10 30 60 120 0; do",
        "  if install; then installed=0; break; fi",
        '  sleep "$wait"',
        "done",
        *(_token(job.token_parameter) if job.token_parameter else []),
        "code=8",
        'if [ "$installed" = 0 ]; then',
        f"  for try in $(seq {TRIES}); do",
        f'    "$bin/gemma-neuron" {shlex.join(job.command)}',
        "    code=$?",
        '    [ "$code" = 75 ] || break',
        '    report "$code"',
        "    sleep 60",
        "  done",
        "fi",
        'echo "gemma-neuron: exit $code"',
        'report "$code"',
        "shutdown -h now",
    ]
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise UsageError(
            f"The start script would be {len(text.encode()):,} bytes, EC2 takes {MOST_BYTES:,}.",
            "Shorten SOURCE or the mirror's prefix.",
        )
    return text


def _install(toolkit: str) -> list[str]:
    """The exact SDK comes as the extra `neuron`, whose pins no placeholder of the public index meets."""
    lines = ["python3 -m venv /opt/gemma-neuron &&"]
    wheel = WHEEL.fullmatch(toolkit)
    if wheel is not None and wheel[1] == "s3":
        uri, digest = toolkit.partition("#")[0], wheel[2]
        path = "/opt/" + uri.rsplit("/", 1)[1]
        lines.append(f"aws s3 cp {shlex.quote(uri)} {shlex.quote(path)} &&")
        lines.append(f"echo {shlex.quote(f'{digest}  {path}')} | sha256sum --check --quiet &&")
        wanted = f"gemma-neuron[neuron] @ file://{path}"
    elif wheel is not None or COMMIT.fullmatch(toolkit):
        wanted = f"gemma-neuron[neuron] @ {toolkit}"
    else:
        wanted = toolkit.replace("gemma-neuron==", "gemma-neuron[neuron]==")
    lines.append(
        f'"$bin/pip" install --quiet --extra-index-url {NEURON_PIP_INDEX} {shlex.quote(wanted)}'
    )
    return lines


def _token(parameter: str) -> list[str]:
    """The hub's token, read with the box's own rights; it stands in the environment of this script alone."""
    name = shlex.quote(parameter)
    return [
        f"HF_TOKEN=$(aws ssm get-parameter --name {name} --with-decryption --query Parameter.Value --output text)",
        "export HF_TOKEN",
    ]


def _report(bucket: str, prefix: str, job: str) -> str:
    """A shell function that leaves the log and the exit code in the mirror's bucket."""
    base = shlex.quote(f"s3://{bucket}/{prefix}")
    return "\n".join(
        [
            "report() {",
            "  local token id",
            "  token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' http://169.254.169.254/latest/api/token)",
            '  id=$(curl -sf -H "X-aws-ec2-metadata-token: $token" http://169.254.169.254/latest/meta-data/instance-id)',
            f'  aws s3 cp --quiet /var/log/gemma-neuron.log {base}/"$id".log',
            f'  printf \'{{"job": "{job}", "instance": "%s", "exit": %d}}\\n\' "$id" "$1" |'
            f' aws s3 cp --quiet - {base}/"$id".json',
            "}",
        ]
    )
