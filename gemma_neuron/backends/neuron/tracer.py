"""One unit traced by NxD inside its parallel state, audited, with the key of what compiling it will give.

World size is tp, not the instance's core count: NxD refuses a world that tp does not divide (12 by 8), and the
other cores are simply not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import digest_bytes, digest_json
from gemma_neuron.backends.base import PortPart, UnitSpec
from gemma_neuron.backends.neuron import audit, environment, sdk
from gemma_neuron.backends.neuron.flags import LOGICAL_CORES
from gemma_neuron.backends.neuron.interface import Interface, interface_of, read_interface
from gemma_neuron.backends.neuron.keys import shared_key
from gemma_neuron.errors import CompileError

VOLATILE = ("metadata", "stack_frame_index", "profile_info")
"""Fields of an HLO proto that say where a graph was traced, not what it is."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A unit as NxD traced it. `trace` is None for the layout unit, which is made from decode's layout."""

    part: PortPart
    key: dict[str, str]
    interface: Interface
    trace: Any
    priority: Path
    """The decode unit's folder; read by units whose weights take its layout."""

    @property
    def unit(self) -> UnitSpec:
        return self.part.unit

    def dry_files(self) -> dict[str, bytes]:
        assert self.trace is not None
        name = self.unit.name
        command = f"neuronx-cc compile graph.hlo --framework=XLA --output={name}.neff {self.key['flags']}\n"
        graph: bytes = self.trace.hlo.SerializeToString()
        return {"graph.hlo": graph, "command.txt": command.encode()}


def trace(part: PortPart) -> Traced:
    """Raises CompileError when NxD cannot trace the graph or the graph is not the plan's."""
    environment.for_compiling()
    priority = part.port.unit_folder(part.spec.decode_unit)
    if part.unit.phase == "layout":
        interface = read_interface(priority)
        key = {"graph": digest_json(interface.weights), **shared_key(part)}
        return Traced(part, key, interface, None, priority)
    artifacts = _traced(part)
    _audit(part, artifacts.metaneff)
    key = {"graph": hlo_digest(artifacts.hlo), **shared_key(part)}
    return Traced(part, key, interface_of(artifacts), artifacts, priority)


def _traced(part: PortPart) -> Any:
    kit = sdk.load()
    from gemma_neuron.backends.neuron.shell import RankShell
    from gemma_neuron.backends.tensors import INPUT_NAMES, TORCH_DTYPES, example_inputs
    from gemma_neuron.models.view import rank_view

    view = rank_view(part.geometry, part.plan, part.spec)
    inputs = dict(zip(INPUT_NAMES, example_inputs(part.unit), strict=False))
    tp = part.plan.tp
    # An exception on entering would leave torch.distributed replaced by NxD's mock; tp divides itself, so none comes.
    with kit.parallel.NxDParallelState(
        world_size=tp, tensor_model_parallel_size=tp, lnc_size=LOGICAL_CORES
    ):
        shell = RankShell(
            view, part.plan, TORCH_DTYPES[part.spec.dtype], part.spec.max_context, kit.mappings
        )
        shell.eval()
        try:
            return kit.functions.trace(shell, kwargs=inputs, preserve_parameters=True)
        except RuntimeError as error:
            raise CompileError(
                f"{part.unit.name} could not be traced: {error.__cause__ or error}.",
                "Nothing was compiled; `--dry-run` traces alone.",
            ) from error


def _audit(part: PortPart, metaneff: Any) -> None:
    from gemma_neuron.models.view import rank_view

    kit = sdk.load()
    kinds, to_torch = kit.metaneff.MetaTensor.Type, kit.tracing.get_torch_dtype
    weights, states = audit.traced_tables(metaneff, kinds, to_torch)
    spec, unit = part.spec, part.unit.name
    wanted = audit.expected_weights(part.plan, spec.dtype, spec.max_context)
    audit.require_same("weights", unit, wanted, weights)
    view = rank_view(part.geometry, part.plan, spec)
    audit.require_same("states", unit, audit.expected_states(view, spec.dtype), states)


def hlo_digest(module: Any) -> str:
    """Digest of an HLO module without what names files and lines of the code it was traced from."""
    copy = type(module)()
    copy.CopyFrom(module)
    copy.ClearField("id")
    _clear(copy, ("stack_frame_index", "profile_info"))
    for computation in copy.computations:
        for instruction in computation.instructions:
            _clear(instruction, VOLATILE)
    return digest_bytes(copy.SerializeToString(deterministic=True))


def _clear(message: Any, names: tuple[str, ...]) -> None:
    known = message.DESCRIPTOR.fields_by_name
    for name in names:
        if name in known:
            message.ClearField(name)
