"""A loaded port on NeuronCores: one process drives all ranks of a replica through one NxDModel.

Nothing is traced here: NEFFs, metaneffs and interfaces come from the port's units. Weights are views of the mapped
rank files; only a tensor stored in another dtype than the graph's is copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.backends.graph_runner import GraphRunner, verified_unit
from gemma_neuron.backends.neuron import audit, devices, environment, sdk
from gemma_neuron.backends.neuron.compiler import GRAPH_NAME, NEFF_NAME
from gemma_neuron.backends.neuron.cores import CoreNote, cores_of
from gemma_neuron.backends.neuron.diagnose import chain, explained
from gemma_neuron.backends.neuron.flags import TARGET
from gemma_neuron.backends.neuron.interface import (
    METANEFF_NAME,
    read_interface,
    trace_artifacts,
)
from gemma_neuron.backends.neuron.keys import SDK_PACKAGES, versions
from gemma_neuron.backends.neuron.shell import CORE, ROWS, row_numbers
from gemma_neuron.backends.tensors import INPUT_NAMES, TORCH_DTYPES, weight_dtype
from gemma_neuron.errors import EnvironmentProblem, GemmaNeuronError
from gemma_neuron.port import Port

log = logging.getLogger(__name__)


class NeuronRunner(GraphRunner):
    """See `backends.base.Runner`. Raises IntegrityError, DoesNotFitError, EnvironmentProblem."""

    def __init__(self, port: Port, replica: int = 0) -> None:
        super().__init__(port)
        plan = port.plan
        audit.check_rank_files((port.rank_file(rank) for rank in range(plan.tp)), plan)
        here = {"target": TARGET, **versions(SDK_PACKAGES)}
        for unit in port.spec.units():
            verified_unit(port, unit, here)
        cores = cores_of(replica, plan.tp, devices.core_count())
        environment.for_running(cores, f"gemma-neuron-{port.record.digest[:12]}-{replica}")
        self._note = CoreNote(cores)
        try:
            kit = sdk.load()
            self._model: Any = self._ask("loading the port", lambda: _loaded(kit, port))
            self._warm_up(port)
        except BaseException:
            self.close()
            raise

    def run(self, unit: UnitSpec, *inputs: NDArray[np.int32]) -> list[NDArray[np.float32]]:
        # NxD routes by names and shapes, never by dtype: int64 tokens would reach an int32 graph.
        assert all(x.dtype == np.int32 for x in inputs), [x.dtype for x in inputs]
        given = {n: torch.from_numpy(x) for n, x in zip(INPUT_NAMES, inputs, strict=False)}
        outputs = self._ask(
            f"running {unit.name}", lambda: self._model.forward(model_name=unit.name, **given)
        )
        one = isinstance(outputs, torch.Tensor)
        return [x.cpu().float().numpy() for x in ([outputs] if one else outputs)]

    def close(self) -> None:
        """Release model and cores in order; until then the cores count as this process's."""
        self._model = None
        self._note.remove()

    def _warm_up(self, port: Port) -> None:
        """Each graph once, on rows of length 0, which change no state."""
        for unit in port.spec.graphs():
            started = time.monotonic()
            shape = (unit.batch, unit.length)
            tokens, positions = np.zeros((2, *shape), np.int32)
            slots = np.arange(unit.batch, dtype=np.int32)
            targets = [tokens] if unit.phase == "score" else []
            self.run(unit, tokens, positions, slots, np.zeros(unit.batch, np.int32), *targets)
            log.info("warmed up %s in %.1f s", unit.name, time.monotonic() - started)

    def _ask(self, what: str, action: Callable[[], Any]) -> Any:
        """Call into NxD and its runtime; their failures become ours, by what they say."""
        try:
            with torch.no_grad():
                return action()
        except GemmaNeuronError:
            raise
        except Exception as error:  # whatever closed code raises, protobuf's own included
            raise explained(
                f"The Neuron runtime failed {what}",
                chain(error),
                EnvironmentProblem,
                "Run `gemma-neuron doctor`.",
            ) from error


def _loaded(kit: sdk.Sdk, port: Port) -> Any:
    """An NxDModel of every graph, weights and zeroed states on the cores."""
    plan, spec = port.plan, port.spec
    model = kit.nxd_model.NxDModel(world_size=plan.tp, layout_transformer=_transformer(kit, port))
    for unit in spec.graphs():
        folder = port.unit_folder(unit)
        compiled = kit.artifacts.CompilationArtifacts(str(folder / NEFF_NAME))
        model.add(unit.name, trace_artifacts(kit, folder, read_interface(folder)), compiled)
    with ExitStack() as files:
        weights = [_rank_weights(files, port, rank) for rank in range(plan.tp)]
        model.set_weights(weights)
        model.to_neuron()
    return model


def _transformer(kit: sdk.Sdk, port: Port) -> Any | None:
    """NxD's LayoutTransformerArtifacts; None when there is no layout unit or it changes nothing."""
    if not port.spec.layout:
        return None
    folder = port.unit_folder(port.spec.layout_unit)
    if not (folder / NEFF_NAME).is_file():
        return None
    return kit.artifacts.LayoutTransformerArtifacts(
        str(folder / GRAPH_NAME), str(folder / NEFF_NAME), str(folder / METANEFF_NAME)
    )


def _rank_weights(files: ExitStack, port: Port, rank: int) -> dict[str, torch.Tensor]:
    """One rank's weights under the graph's names, mapped. Verifies the rank file's digest first."""
    plan, dtype = port.plan, TORCH_DTYPES[port.spec.dtype]
    port.rank_set(rank).verify()
    file: Any = files.enter_context(safe_open(port.rank_file(rank), framework="pt"))
    weights = {
        CORE + p.name: file.get_tensor(p.name).to(weight_dtype(plan, p.name, dtype))
        for p in plan.parameters
    }
    return weights | {ROWS: row_numbers(port.spec.max_context)}
