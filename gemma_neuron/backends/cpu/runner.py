"""A loaded port on the CPU: packages that share one set of weights and one KV state.

Weights are mapped from the rank files and, at one rank in the port's own dtype, never copied. Every package gets
the same KV tensors, which its graph writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from gemma_neuron.backends.base import CompileSpec, UnitSpec
from gemma_neuron.backends.cpu.compiler import PACKAGE_NAME
from gemma_neuron.backends.cpu.ranks import empty_state, rank_axes
from gemma_neuron.backends.cpu.toolchain import host_key
from gemma_neuron.backends.graph_runner import GraphRunner, verified_unit
from gemma_neuron.backends.tensors import TORCH_DTYPES, flat, weight_dtype
from gemma_neuron.errors import IntegrityError
from gemma_neuron.models.view import rank_view
from gemma_neuron.plan import ShardPlan
from gemma_neuron.port import Port

Graph = Callable[..., list[torch.Tensor]]


def load_weights(port: Port) -> dict[str, torch.Tensor]:
    """Every weight with its rank axis, mapped where no copy is needed. Verifies each rank's digest."""
    plan, spec = port.plan, port.spec
    axes = rank_axes(plan, rank_view(port.geometry, plan, spec))
    for rank in range(plan.tp):
        port.rank_set(rank).verify()
    files: list[Any] = [safe_open(port.rank_file(rank), framework="pt") for rank in range(plan.tp)]
    dtype = TORCH_DTYPES[spec.dtype]
    weights = {}
    for p in plan.parameters:
        if axes[p.name] is None:
            tensor = files[0].get_tensor(p.name)
        else:
            tensor = torch.stack([file.get_tensor(p.name) for file in files])
        weights[p.name] = tensor.to(weight_dtype(plan, p.name, dtype))
    return weights


class CpuRunner(GraphRunner):
    """See `backends.base.Runner`."""

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        spec, plan = port.spec, port.plan
        view = rank_view(port.geometry, plan, spec)
        self._state = empty_state(plan, view, TORCH_DTYPES[spec.dtype])
        axes = rank_axes(plan, view)
        self._ring_axes = {
            name: int(axes[name] is not None)  # the slots' axis stands behind the ranks'
            for name, shape in view.state_shapes().items()
            if shape[2] < spec.max_context
        }
        self._tensors = {
            flat(name): tensor for name, tensor in (load_weights(port) | self._state).items()
        }
        self._graphs = {unit.name: self._load(port, unit) for unit in spec.units()}
        self._decode_flags = _decode_flags(plan, spec)

    def run(self, unit: UnitSpec, *inputs: NDArray[np.int32]) -> list[NDArray[np.float32]]:
        flags = self._decode_flags if unit.phase == "decode" else nullcontext
        with torch.inference_mode(), flags():
            outputs = self._graphs[unit.name](*(torch.from_numpy(x) for x in inputs))
        return [output.numpy() for output in outputs]

    def save(self, slot: int) -> list[torch.Tensor]:
        return [ring.clone() for ring in self._rings(slot)]

    def restore(self, slot: int, saved: list[torch.Tensor]) -> None:
        for ring, old in zip(self._rings(slot), saved, strict=True):
            ring.copy_(old)

    def _rings(self, slot: int) -> list[torch.Tensor]:
        """Views of what a slot's sliding layers hold."""
        return [self._state[name].select(axis, slot) for name, axis in self._ring_axes.items()]

    def close(self) -> None:
        self._graphs.clear()
        self._tensors.clear()

    def _load(self, port: Port, unit: UnitSpec) -> Graph:
        from torch._inductor import aoti_load_package

        verified_unit(port, unit, host_key())
        package: Any = aoti_load_package(str(port.unit_folder(unit) / PACKAGE_NAME))
        names = package.get_constant_fqns()
        if missing := sorted(set(names) - set(self._tensors)):
            raise IntegrityError(
                f"{unit.name} asks for {', '.join(missing[:4])}, which the rank files do not hold.",
                "Compile into a new folder.",
            )
        package.load_constants(
            {name: self._tensors[name] for name in names},
            check_full_update=False,
            user_managed=True,
        )
        graph: Graph = package
        return graph


def _decode_flags(plan: ShardPlan, spec: CompileSpec) -> Callable[[], AbstractContextManager[None]]:
    """oneDNN off for one-row bfloat16 products at one rank.

    Measured on 270M: its matrix-vector product takes 1.6 times as long as torch's own; from two rows on it
    is the faster one.
    """
    if spec.slots == 1 and plan.tp == 1 and spec.dtype == "bfloat16":
        return _without_onednn
    return nullcontext


@contextmanager
def _without_onednn() -> Iterator[None]:
    """The flag is the process's, so it is put back. `flags()` would also set what it does not change, and
    warn at each call of a flag of GPUs that are not there."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)
