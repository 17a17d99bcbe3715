"""One graph, lowered in a process of its own: a second bucket in one process once died in torch_xla's allocator.

In: a JSON object on stdin. Out: one JSON line; the HLO text goes into a file. torch_xla comes before all of ours.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch_xla  # isort: skip
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from gemma_neuron.backends.base import CompileSpec, UnitSpec
from gemma_neuron.backends.neuron.shell import RankShell
from gemma_neuron.backends.tensors import INPUT_NAMES, TORCH_DTYPES, example_inputs
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.models.view import rank_view
from gemma_neuron.sharding.placement import place


class Mappings:
    """The two mapping functions as NxD's parallel_layers/comm.py calls torch_xla."""

    def __init__(self, world: int) -> None:
        self.groups = [list(range(world))]

    def reduce_from_tensor_model_parallel_region(self, x: Any) -> Any:
        if len(self.groups[0]) == 1:
            return x
        return xm.all_reduce(xm.REDUCE_SUM, [x], groups=self.groups, pin_layout=True)[0]

    def gather_from_tensor_model_parallel_region_with_dim(self, x: Any, dim: int) -> Any:
        if len(self.groups[0]) == 1:
            return x
        moved = x.transpose(0, dim)
        joined = xm.all_gather(moved, dim=0, groups=self.groups, output=None, pin_layout=False)
        return joined.contiguous().transpose(0, dim)


def main() -> None:
    asked = json.loads(sys.stdin.read())
    world = asked["tp"]
    xr.world_size = lambda: world
    xr.global_ordinal = lambda: asked["rank"]
    before = peak()
    geometry = read_geometry(asked["config"])
    plan = place(geometry, read_parameter_table(geometry), world, asked["strategy"])
    spec = CompileSpec(backend="neuron", **asked["spec"])
    unit = UnitSpec(**asked["unit"])
    dtype = TORCH_DTYPES[spec.dtype]
    shell = RankShell(
        rank_view(geometry, plan, spec), plan, dtype, spec.max_context, Mappings(world)
    )
    if asked.get("weights"):
        fill(shell, asked)
    device = torch_xla.device()
    shell.eval().to(device)
    held = dict(shell.named_parameters()) | dict(shell.named_buffers())
    inputs = dict(zip(INPUT_NAMES, example_inputs(unit), strict=False))
    if asked.get("inputs"):
        inputs = {n: torch.tensor(v, dtype=torch.int32) for n, v in asked["inputs"].items()}
    with torch.no_grad():
        outputs = list(shell(**{name: value.to(device) for name, value in inputs.items()}))
    states = [getattr(shell, own) for own in shell.state_names.values()]
    answer: dict[str, Any] = {}
    if asked.get("weights"):
        keep(outputs, dict(zip(shell.state_names.values(), states, strict=True)), asked)
    else:
        context = torch_xla._XLAC.lowering.LoweringContext("graph")
        context.build(outputs + states)
        proto = context.hlo()
        numbers = {name: context.tensor_parameter_id(value) for name, value in held.items()}
        text = torch_xla._XLAC._get_xla_tensors_hlo(outputs + states)
        Path(asked["text"]).write_text(text)
        answer = {
            "bytes": len(proto),
            "numbers": {name: -1 if n is None else n for name, n in numbers.items()},
            "shapes": {name: [list(v.shape), str(v.dtype)] for name, v in held.items()},
            "states": list(shell.state_names.values()),
            "outputs": [[list(v.shape), str(v.dtype)] for v in outputs + states],
        }
    answer |= {"base_bytes": before, "peak_bytes": peak()}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


def fill(shell: Any, asked: dict[str, Any]) -> None:
    """Weights and states of files instead of blank ones."""
    from safetensors.torch import load_file

    tensors = load_file(asked["weights"])
    parameters = dict(shell.named_parameters())
    for name, tensor in tensors.items():
        target = parameters[f"core.{name}"]
        target.data.copy_(tensor.to(target.dtype))
    if asked.get("states"):
        buffers = dict(shell.named_buffers())
        for name, tensor in load_file(asked["states"]).items():
            buffers[name].copy_(tensor)


def keep(outputs: list[Any], states: dict[str, Any], asked: dict[str, Any]) -> None:
    """Execute on the CPU client, and write outputs and states."""
    from safetensors.torch import save_file

    torch_xla.sync()
    made = {f"out.{i}": value.cpu().contiguous() for i, value in enumerate(outputs)}
    save_file(made, asked["out"])
    save_file({n: v.cpu().contiguous() for n, v in states.items()}, asked["new_states"])


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
