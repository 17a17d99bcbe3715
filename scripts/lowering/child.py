"""Lowers and runs graphs by the real torch_xla, each in a process of its own: a second bucket in one process once died
in torch_xla's allocator.

In: a JSON object a line on stdin. Out: a JSON line each, `{"error": …}` when its process failed. torch_xla takes
seconds to import, so this process imports it once, makes nothing with it, and forks for each object. It comes before
all of ours.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import torch_xla  # isort: skip
import torch

from gemma_neuron.backends.base import CompileSpec, PortPart, UnitSpec
from gemma_neuron.backends.neuron.shell import RankShell
from gemma_neuron.backends.neuron.tracer import trace
from gemma_neuron.backends.tensors import INPUT_NAMES, TORCH_DTYPES, example_inputs
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.models.view import rank_view
from gemma_neuron.port import Port
from gemma_neuron.sharding.placement import place
from scripts.lowering import tracing
from scripts.lowering.mappings import Mappings, world_of


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(forked(json.loads(line))) + "\n")
        sys.stdout.flush()


def forked(asked: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own answers."""
    asked["library_bytes"] = library_bytes()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            found = (run if asked.get("weights") else lowered)(asked)
        except BaseException:
            found = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)  # torch_xla's own end of a process may hang
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    found = json.loads(text) if text else {"error": f"the process ended with status {status}"}
    return dict(found)


def part_of(asked: dict[str, Any]) -> PortPart:
    geometry = read_geometry(asked["config"])
    plan = place(geometry, read_parameter_table(geometry), asked["tp"], asked["strategy"])
    spec, unit = CompileSpec(backend="neuron", **asked["spec"]), UnitSpec(**asked["unit"])
    return PortPart(geometry=geometry, plan=plan, spec=spec, unit=unit, port=Port(Path("none")))


def lowered(asked: dict[str, Any]) -> dict[str, Any]:
    """One rank's graph: by the product's own tracing on NxD's source, or with NxD's two mappings written out."""
    part = part_of(asked)
    if asked.get("nxd"):
        tracing.provide(Path(asked["nxd"]))
        trace(part)
        made = tracing.MADE[-1]
    else:
        world_of(part.plan.tp, asked["rank"])
        inputs = dict(zip(INPUT_NAMES, example_inputs(part.unit), strict=False))
        made = tracing.lower(shell_of(part).eval(), inputs)
    Path(asked["text"]).write_text(made.text)
    # A process of its own would also have what importing touched of the libraries, which a fork has not mapped.
    return made.facts() | {"peak_bytes": asked["library_bytes"] + peak() - library_bytes()}


def shell_of(part: PortPart) -> RankShell:
    view = rank_view(part.geometry, part.plan, part.spec)
    dtype = TORCH_DTYPES[part.spec.dtype]
    return RankShell(view, part.plan, dtype, part.spec.max_context, Mappings(part.plan.tp))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Execute one call on the CPU client, with weights and states of files; outputs and states into files."""
    from safetensors.torch import load_file, save_file

    part = part_of(asked)
    world_of(part.plan.tp, asked["rank"])
    shell = shell_of(part)
    parameters, buffers = dict(shell.named_parameters()), dict(shell.named_buffers())
    for name, tensor in load_file(asked["weights"]).items():
        parameters[f"core.{name}"].data.copy_(tensor)
    for name, tensor in (load_file(asked["states"]) if asked["states"] else {}).items():
        buffers[name].copy_(tensor)
    device = torch_xla.device()
    shell.eval().to(device)
    inputs = {
        n: torch.tensor(v, dtype=torch.int32, device="cpu") for n, v in asked["inputs"].items()
    }
    with torch.no_grad():
        outputs = list(shell(**{name: value.to(device) for name, value in inputs.items()}))
    torch_xla.sync()
    names = shell.state_names.values()
    save_file({f"out.{i}": v.cpu().contiguous() for i, v in enumerate(outputs)}, asked["out"])
    save_file({n: getattr(shell, n).cpu().contiguous() for n in names}, asked["new_states"])
    return {}


def peak() -> int:
    """Most resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def library_bytes() -> int:
    """Resident bytes of this process that are pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


if __name__ == "__main__":
    main()
