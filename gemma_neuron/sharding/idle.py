"""What would use the cores that a plan leaves idle: computed for the instance, none of it known by heart. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import Instance
from gemma_neuron.models.registry import read_parameter_table
from gemma_neuron.models.sizes import size_geometry, size_names, size_of
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.sharding.memory import RankBytes, rank_bytes, room
from gemma_neuron.sharding.placement import obstacles, place


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleUse:
    """One way to use more cores. `model`: a released size, or `this model`; `reason` says why it works or not."""

    model: str
    tp: int
    replicas: int
    cores: int
    works: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a core must hold beside weights: shapes of a port's graphs."""

    context: int
    slots: int
    buckets: tuple[int, ...]
    dtype: str

    def bytes_of(self, geometry: ModelGeometry, table: ParameterTable, tp: int) -> RankBytes:
        """A rank's bytes at a degree that divides, each KV head on neighbouring ranks where they do not."""
        context = min(self.context, geometry.max_context)
        plan = place(geometry, table, tp, "replicate-kv")
        return rank_bytes(geometry, plan, context, self.slots, self.buckets, self.dtype)


def idle_uses(
    geometry: ModelGeometry, table: ParameterTable, instance: Instance, tp: int, load: Load
) -> tuple[IdleUse, ...]:
    """More replicas, degrees that would use more cores, and a smaller model beside; empty when none is idle."""
    replicas = instance.cores // tp
    used = replicas * tp
    found = []
    if replicas > 1:
        found.append(
            IdleUse(
                model="this model",
                tp=tp,
                replicas=replicas,
                cores=used,
                works=True,
                reason=f"{replicas} replicas of the same port use {used} of {instance.cores} cores",
            )
        )
    if used < instance.cores:
        found += _other_degrees(geometry, table, instance, used, load)
        found += _beside(geometry, instance, instance.cores - used, load)
    return tuple(found)


def degrees_that_fit(
    geometry: ModelGeometry, table: ParameterTable, instance: Instance, load: Load
) -> list[int]:
    """Degrees of the instance's list at which the model divides and a core holds its part."""
    return [
        tp
        for tp in instance.tp_possible
        if tp <= instance.cores
        and not obstacles(geometry, tp)
        and load.bytes_of(geometry, table, tp).total <= room(instance)
    ]


def _other_degrees(
    geometry: ModelGeometry, table: ParameterTable, instance: Instance, used: int, load: Load
) -> Iterator[IdleUse]:
    """The same model at a listed degree whose replicas cover more cores, and whether that works."""
    for tp in instance.tp_possible:
        replicas = instance.cores // tp
        if not used < replicas * tp:
            continue
        wrong = obstacles(geometry, tp)
        need = None if wrong else load.bytes_of(geometry, table, tp).total
        works = need is not None and need <= room(instance)
        if need is None:
            reason = "; ".join(wrong)
        else:
            verb = "needs" if works else "does not fit: needs"
            reason = f"{verb} {need / 1e9:.1f} GB a core of {room(instance) / 1e9:.1f}"
        yield IdleUse(
            model="this model",
            tp=tp,
            replicas=replicas,
            cores=replicas * tp,
            works=works,
            reason=reason,
        )


def _beside(
    geometry: ModelGeometry, instance: Instance, left: int, load: Load
) -> Iterator[IdleUse]:
    """The largest other released size that fits the cores left over, at the largest degree there."""
    own = size_of(geometry)
    degrees = [tp for tp in reversed(instance.tp_possible) if tp <= left]
    for name in reversed(size_names()):
        if name == own:
            continue
        other = size_geometry(name)
        table = read_parameter_table(other)
        for tp in degrees:
            if obstacles(other, tp):
                continue
            need = load.bytes_of(other, table, tp).total
            if need <= room(instance):
                yield IdleUse(
                    model=f"gemma-4-{name}",
                    tp=tp,
                    replicas=left // tp,
                    cores=left // tp * tp,
                    works=True,
                    reason=f"a second port on the other cores needs {need / 1e9:.1f} GB a core of "
                    f"{room(instance) / 1e9:.1f}",
                )
                return
            break  # a smaller degree needs more a core
