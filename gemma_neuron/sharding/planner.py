"""Lay a model over ranks each way that is valid, price the ways, choose one. Pure, no torch.

In: geometry, parameter table, what was asked. Out: `Planned` with the chosen `ShardPlan` and all candidates side by
side. Refused (exit 4): a tp that cannot be, a core or a host that is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast, get_args

from gemma_neuron.backends.base import CompileSpec, HostBytes, PortPart
from gemma_neuron.errors import DoesNotFitError, IndivisibleError, UsageError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.parameters import ParameterTable
from gemma_neuron.plan import ShardPlan, Strategy
from gemma_neuron.port import Port
from gemma_neuron.sharding.candidates import (
    PLAN_DTYPE,
    Candidate,
    Planned,
    PlanRequest,
    StrategyChoice,
)
from gemma_neuron.sharding.compile_time import compile_time
from gemma_neuron.sharding.host_memory import HostPeaks, host_peaks, require_host_memory
from gemma_neuron.sharding.idle import Load, degrees_that_fit, idle_uses
from gemma_neuron.sharding.memory import (
    RUNTIME_RESERVE_BYTES,
    rank_bytes,
    room,
    weight_bytes,
)
from gemma_neuron.sharding.placement import nearest_degrees, obstacles, place
from gemma_neuron.sharding.roofline import decode_speed

CONTEXT_STEP = 1024
"""Contexts that a refusal names are multiples of this."""


def layout(
    geometry: ModelGeometry, table: ParameterTable, tp: int, strategy: StrategyChoice, dtype: str
) -> ShardPlan:
    """The plan alone, for stages that have no instance: `auto` takes the fewest weight bytes a rank."""
    plans = [place(geometry, table, tp, name) for name in strategies(strategy)]
    return min(plans, key=lambda plan: weight_bytes(plan, dtype))


def strategies(choice: str) -> tuple[Strategy, ...]:
    """The strategies a choice stands for. Raises UsageError for an unknown one."""
    known = get_args(Strategy)
    if choice != "auto" and choice not in known:
        raise UsageError(
            f"There is no strategy {choice!r}; there are auto, {', '.join(known)}.",
            "Leave --strategy out for the cheapest valid one.",
        )
    # replicate-kv first: where nothing has to be replicated both are the same plan.
    return ("replicate-kv", "replicate-global") if choice == "auto" else (cast(Strategy, choice),)


def make_plan(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest, host_bytes: HostBytes
) -> Planned:
    """All candidates and the chosen one; `host_bytes`: the neuron back end's prediction for a unit.

    Raises IndivisibleError or DoesNotFitError.
    """
    strategies(asked.strategy)
    _require_degree(geometry, table, asked, host_bytes)
    candidates = _explained(_candidates(geometry, table, asked), geometry, asked)
    chosen = _choice(candidates, asked)
    if not chosen.fits:
        _refuse_bytes(geometry, table, asked, chosen, host_bytes)
    host = _host(geometry, table, chosen.plan, asked, host_bytes)
    return Planned(
        geometry=geometry,
        asked=asked,
        chosen=chosen,
        candidates=candidates,
        decision=_decision(candidates, chosen, asked),
        host=host,
        idle_uses=idle_uses(geometry, table, asked.instance, asked.tp, _load(asked)),
        compile_time=compile_time(geometry, asked.tp, asked.instance.chip),
        notes=_notes(asked),
    )


def _candidates(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest
) -> list[Candidate]:
    plans = [place(geometry, table, asked.tp, name) for name in strategies("auto")]
    return [_priced(geometry, plan, asked) for plan in plans]


def _choice(candidates: Sequence[Candidate], asked: PlanRequest) -> Candidate:
    allowed = [c for c in candidates if c.plan.strategy in strategies(asked.strategy)]
    return min(allowed, key=lambda c: (not c.fits, c.bytes.total))


def _would_plan(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest, host_bytes: HostBytes
) -> bool:
    """Whether a changed request fits the core and the host: only such a one is worth a hint."""
    chosen = _choice(_candidates(geometry, table, asked), asked)
    if not chosen.fits:
        return False
    try:
        _host(geometry, table, chosen.plan, asked, host_bytes)
    except DoesNotFitError:
        return False
    return True


def _degrees(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest, host_bytes: HostBytes
) -> list[str]:
    """Other degrees with which the rest of the request fits, as flags, rising."""
    degrees = degrees_that_fit(geometry, table, asked.instance, _load(asked))
    return [
        f"--tp {n}"
        for n in degrees
        if n != asked.tp and _would_plan(geometry, table, replace(asked, tp=n), host_bytes)
    ]


def _load(asked: PlanRequest) -> Load:
    return Load(context=asked.context, slots=asked.slots, buckets=asked.buckets, dtype=PLAN_DTYPE)


def _require_degree(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest, host_bytes: HostBytes
) -> None:
    """Refuse a degree that the heads, widths or the instance rule out, with the nearest that work."""
    tp, instance = asked.tp, asked.instance
    wrong = [f"tp is {tp}; at least 1 is needed"] if tp < 1 else obstacles(geometry, tp)
    if wrong:
        near = [
            f"--tp {n}" + ("" if n <= instance.cores else f" on an instance with {n} cores or more")
            for n in nearest_degrees(geometry, tp)
        ]
        raise IndivisibleError(
            f"tp {tp} cannot be: {'; '.join(wrong)}.", f"The nearest: {' or '.join(near)}."
        )
    if tp > instance.cores:
        near = _degrees(geometry, table, asked, host_bytes)[-2:]
        raise DoesNotFitError(
            f"tp {tp} needs {tp} NeuronCores; {instance.name} has {instance.cores}.",
            f"The nearest that fit there: {' or '.join(near)}."
            if near
            else "No degree fits its cores and the host's memory: take a larger --instance.",
        )


def _priced(geometry: ModelGeometry, plan: ShardPlan, asked: PlanRequest) -> Candidate:
    used = rank_bytes(geometry, plan, asked.context, asked.slots, asked.buckets, PLAN_DTYPE)
    return Candidate(
        plan=plan,
        bytes=used,
        fits=used.total <= room(asked.instance),
        speed=decode_speed(geometry, plan, asked.instance, asked.context, asked.slots, PLAN_DTYPE),
        reasons=plan.reasons,
    )


def _explained(
    candidates: list[Candidate], geometry: ModelGeometry, asked: PlanRequest
) -> tuple[Candidate, ...]:
    """Each candidate with what it costs beside the cheapest, and why it does not fit if it does not."""
    least = min(candidates, key=lambda c: c.bytes.total)
    explained = []
    for candidate in candidates:
        more = list(candidate.reasons or ("every layer's heads divide over the ranks",))
        weights = candidate.bytes.weights - least.bytes.weights
        kv = candidate.bytes.kv - least.bytes.kv
        if weights or kv:
            more.append(
                f"costs {weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV cache a core more"
            )
        if not candidate.fits:
            missing = candidate.bytes.total - room(asked.instance)
            more.append(f"does not fit: {missing / 1e9:.2f} GB a core too much")
        explained.append(
            Candidate(
                plan=candidate.plan,
                bytes=candidate.bytes,
                fits=candidate.fits,
                speed=candidate.speed,
                reasons=tuple(more),
            )
        )
    return tuple(explained)


def _decision(candidates: tuple[Candidate, ...], chosen: Candidate, asked: PlanRequest) -> str:
    """What decided, in one sentence with the numbers."""
    name = chosen.plan.strategy
    others = [c for c in candidates if c is not chosen]
    if asked.strategy != "auto":
        return f"{name} was asked for."
    if all(c.bytes == chosen.bytes for c in others):
        return f"At tp {asked.tp} both strategies are one layout."
    other = min(others, key=lambda c: c.bytes.total)
    return (
        f"auto takes {name}: {chosen.bytes.total / 1e9:.2f} GB a core instead of "
        f"{other.bytes.total / 1e9:.2f}, and at most {chosen.speed.bound:.1f} tokens/s instead of "
        f"{other.speed.bound:.1f}"
        + ("." if other.fits else f"; {other.plan.strategy} does not fit.")
    )


def _refuse_bytes(
    geometry: ModelGeometry,
    table: ParameterTable,
    asked: PlanRequest,
    chosen: Candidate,
    host_bytes: HostBytes,
) -> NoReturn:
    instance, used, plan = asked.instance, chosen.bytes, chosen.plan
    ways = []
    if asked.strategy != "auto" and _would_plan(
        geometry, table, replace(asked, strategy="auto"), host_bytes
    ):
        ways.append("--strategy auto")
    ways += _degrees(geometry, table, asked, host_bytes)[:2]
    shorter = [
        n
        for n in asked.buckets
        if _would_plan(geometry, table, replace(asked, buckets=(n,)), host_bytes)
    ]
    if shorter:
        ways.append(f"--buckets {','.join(map(str, shorter))}")
    if (most := _longest_context(geometry, table, asked, host_bytes)) >= CONTEXT_STEP:
        ways.append(f"--max-context {most}")
    slots = f"{asked.slots} slot{'s' if asked.slots > 1 else ''} of {asked.context}"
    raise DoesNotFitError(
        f"{plan.strategy} at tp {asked.tp} needs {used.total:,} bytes a core "
        f"({used.weights:,} weights, {used.kv:,} KV cache for {slots}, {used.scratch:,} scratch); "
        f"{instance.name} has {room(instance):,} after {RUNTIME_RESERVE_BYTES:,} for the runtime.",
        f"What fits there: {' or '.join(ways)}."
        if ways
        else "Nothing of this model fits there: take a larger --instance"
        + (", or fewer --slots." if asked.slots > 1 else "."),
    )


def _longest_context(
    geometry: ModelGeometry, table: ParameterTable, asked: PlanRequest, host_bytes: HostBytes
) -> int:
    """The longest context below the asked one, in steps, with which the rest fits; 0 when none does."""
    low, high = 0, (asked.context - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        shorter = replace(asked, context=middle * CONTEXT_STEP)
        fits = _would_plan(geometry, table, shorter, host_bytes)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * CONTEXT_STEP


def _host(
    geometry: ModelGeometry,
    table: ParameterTable,
    plan: ShardPlan,
    asked: PlanRequest,
    host_bytes: HostBytes,
) -> HostPeaks:
    spec = CompileSpec(
        backend="neuron",
        dtype=PLAN_DTYPE,
        slots=asked.slots,
        max_context=asked.context,
        buckets=asked.buckets,
    )
    nowhere = Port(Path())
    compilers = [
        (
            unit.name,
            host_bytes(PortPart(geometry=geometry, plan=plan, spec=spec, unit=unit, port=nowhere)),
        )
        for unit in spec.units()
    ]
    peaks = host_peaks(
        geometry, table, plan, compilers, budget=asked.host_budget, origin=asked.host_origin
    )
    require_host_memory(peaks, spec.units())
    return peaks


def _notes(asked: PlanRequest) -> tuple[str, ...]:
    """What a user should know of the degree on this instance."""
    instance, notes = asked.instance, []
    if asked.tp not in instance.tp_possible:
        listed = ", ".join(map(str, instance.tp_possible))
        notes.append(f"tp {asked.tp} is on no list for {instance.name} ({listed}): probe it first.")
    elif f"tp {asked.tp} " in instance.tp_note:
        notes.append(f"{instance.name}: {instance.tp_note}.")
    return tuple(notes)
