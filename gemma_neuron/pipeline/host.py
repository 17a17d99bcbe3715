"""How much host memory a run may use, and where that number comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_neuron.backends.base import Backend
from gemma_neuron.instances import Instance
from gemma_neuron.machine import HostBudget, budget_of, instance_type, memory_limit
from gemma_neuron.pipeline.prepare import Prepared
from gemma_neuron.pipeline.request import CompileRequest

if TYPE_CHECKING:
    from gemma_neuron.compilation.prediction import Prediction


def host_budget(asked: int | None, instance: Instance | None = None) -> HostBudget:
    """What was asked, else what `instance` has, else what is here, less the reserve.

    On the instance itself its container counts too, not only its type.
    """
    if asked is not None:
        return HostBudget(asked, "--host-memory")
    if instance is not None and instance_type() != instance.name:
        origin = f"{instance.name}: {instance.host_gib} GiB less a reserve"
        return HostBudget(budget_of(instance.host_bytes), origin)
    found = memory_limit()
    origin = f"this {found.origin}: {found.total / 2**30:.1f} GiB less a reserve"
    return HostBudget(found.budget, origin)


def require_budget(prepared: Prepared, request: CompileRequest, chosen: Backend) -> HostBudget:
    """The budget of this run. Raises DoesNotFitError, before anything is written, when a unit alone passes it."""
    from gemma_neuron.sharding.host_memory import require_compilers

    spec = prepared.record.compile
    assert spec is not None
    budget = host_budget(request.host_memory)
    peaks = [(name, found.host_bytes) for name, found in predicted(prepared, chosen).items()]
    spare_host = chosen.name == "neuron"
    require_compilers(peaks, spec.units(), budget.bytes, budget.origin, spare_host=spare_host)
    return budget


def predicted(prepared: Prepared, chosen: Backend) -> dict[str, Prediction]:
    """Unit name → what compiling it is expected to take."""
    from gemma_neuron.compilation.compiler import parts_of
    from gemma_neuron.compilation.prediction import predict

    spec, geometry = prepared.record.compile, prepared.audit.geometry
    assert spec is not None and geometry is not None
    return predict(parts_of(spec.units(), prepared.port, geometry, prepared.plan, spec), chosen)


def own_peak() -> int:
    """Peak resident bytes of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
