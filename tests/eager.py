"""A runner over a sharded port whose graphs run uncompiled: the model code and the ranks without the compiler.

Compiling takes seconds a graph; equality over many geometries needs the arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemma_neuron.backends.base import CompileSpec, UnitSpec
from gemma_neuron.backends.cpu.ranks import AllRanks
from gemma_neuron.backends.cpu.runner import CpuRunner
from gemma_neuron.backends.tensors import flat
from gemma_neuron.models.view import rank_view
from gemma_neuron.pipeline import CompileRequest, shard
from gemma_neuron.port import Port


class WeightsInPlace(TorchFunctionMode):
    """Linear layers over flattened rows: under `vmap`, torch's own rule copies the weight once per row of the batch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and args[0].dim() > 2:
            rows, weight = args[0].flatten(0, -2), args[1]
            return (rows @ weight.t()).unflatten(0, args[0].shape[:-1])
        return func(*args, **(kwargs or {}))


class EagerRunner(CpuRunner):
    """`CpuRunner` with `AllRanks` in place of every compiled package."""

    def _load(self, port: Port, unit: UnitSpec) -> Callable[..., list[torch.Tensor]]:
        view = rank_view(port.geometry, port.plan, port.spec)
        names = [p.name for p in port.plan.parameters]
        module = AllRanks(
            port.plan,
            view,
            {name: self._tensors[flat(name)] for name in names},
            {name: self._tensors[flat(name)] for name in view.state_shapes()},
        )

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            with WeightsInPlace():
                return list(module(*inputs))

        return run


def eager_port(
    source: Path, out: Path, *, tp: int, strategy: Any = "auto", base: bool = False, **spec: Any
) -> Port:
    """A sharded port with a compile spec and no graphs."""
    request = CompileRequest(out=out, backend="cpu", tp=tp, strategy=strategy, base=base)
    shard(str(source), request, None)
    port = Port(out)
    facts: dict[str, Any] = {
        "backend": "cpu",
        "dtype": "float32",
        "slots": 3,
        "max_context": 64,
        "buckets": (8, 24),
        "score_length": 16,
    }
    port.write_record(port.record.model_copy(update={"compile": CompileSpec(**facts | spec)}))
    return port
