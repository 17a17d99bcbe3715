"""How much host memory a run may use, and where that number comes from."""

from __future__ import annotations

from gemma_neuron.instances import Instance
from gemma_neuron.machine import budget_of, instance_type, memory_limit
from gemma_neuron.pipeline.prepare import Prepared
from gemma_neuron.pipeline.request import CompileRequest


def host_budget(asked: int | None, instance: Instance | None = None) -> tuple[int, str]:
    """(bytes, where from): what was asked, else what `instance` has, else what is here, less the reserve.

    On the instance itself its container counts too, not only its type.
    """
    if asked is not None:
        return asked, "--host-memory"
    if instance is not None and instance_type() != instance.name:
        return budget_of(
            instance.host_bytes
        ), f"{instance.name}: {instance.host_gib} GiB less a reserve"
    found = memory_limit()
    return found.budget, f"this {found.origin}: {found.total / 2**30:.1f} GiB less a reserve"


def most_compilers(prepared: Prepared, request: CompileRequest) -> int:
    """How many compilers the host's memory holds. Raises DoesNotFitError before anything is written."""
    from gemma_neuron.sharding.host_memory import compilers_at_once

    spec = prepared.record.compile
    assert spec is not None and prepared.audit.geometry is not None
    budget, origin = host_budget(request.host_memory)
    return compilers_at_once(
        request.backend,
        prepared.audit.geometry,
        prepared.plan,
        spec.units(),
        budget=budget,
        origin=origin,
    )
