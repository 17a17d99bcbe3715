"""What `plan` shows, in 80 columns: what decides first, then the candidates, the layers, the host, the idle cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gemma_neuron.render import emit_lines, size
from gemma_neuron.render.table import table
from gemma_neuron.sharding.memory import room
from gemma_neuron.sharding.roofline import basis

if TYPE_CHECKING:
    from gemma_neuron.sharding.candidates import Candidate, Planned
    from gemma_neuron.sharding.compile_time import CompileTime
    from gemma_neuron.sharding.host_memory import HostPeaks
    from gemma_neuron.sharding.idle import IdleUse

WIDTH = 80


def show_plan(planned: Planned) -> None:
    """The decision and its reasons, then the tables."""
    chosen, asked = planned.chosen, planned.asked
    name = asked.instance.name
    lead = [
        f"{chosen.plan.strategy} at tp {chosen.plan.tp} on {name}: {size(chosen.bytes.total)} of "
        f"{size(room(asked.instance))} a core",
        planned.decision,
        *planned.notes,
    ]
    if any(c.bytes != chosen.bytes for c in planned.candidates):
        for candidate in planned.candidates:
            lead.append(f"{candidate.plan.strategy}:")
            lead += [f"  {reason}" for reason in candidate.reasons]
    else:
        lead += [f"  {reason}" for reason in chosen.reasons]
    emit_lines(wrapped(lead))
    _candidates(planned)
    emit_lines(wrapped(list(_footnotes(planned))))
    _layers(planned)
    _host(planned.host)
    emit_lines(wrapped([*_idle(planned), *_compile_time(planned.compile_time)]))


def _candidates(planned: Planned) -> None:
    """Candidates side by side, one column each, the chosen one marked."""
    asked = planned.asked
    columns = [c.plan.strategy + (" *" if c is planned.chosen else "") for c in planned.candidates]
    many = asked.slots > 1
    rows = [
        ("weights", [size(c.bytes.weights) for c in planned.candidates]),
        ("KV cache", [size(c.bytes.kv) for c in planned.candidates]),
        ("scratch", [size(c.bytes.scratch) for c in planned.candidates]),
        ("total", [size(c.bytes.total) for c in planned.candidates]),
        (
            f"fits {size(room(asked.instance))}",
            ["yes" if c.fits else "no" for c in planned.candidates],
        ),
        (
            "tokens/s a sequence, at most",
            [f"{c.speed.bound:.1f}" for c in planned.candidates],
        ),
        ("tokens/s a sequence, expected", [_range(c) for c in planned.candidates]),
    ]
    if many:
        rows.append(
            (
                f"tokens/s of {asked.slots} slots, expected",
                [f"{c.speed.expected * asked.slots:.0f}" for c in planned.candidates],
            )
        )
    table(
        f"a core, {asked.slots} slot{'s' if many else ''} of {asked.context}, bfloat16",
        ("", *columns),
        [(name, *cells) for name, cells in rows],
    )


def _range(candidate: Candidate) -> str:
    speed = candidate.speed
    return f"{speed.expected:.0f} ({speed.low:.0f} to {speed.high:.0f})"


def _footnotes(planned: Planned) -> Iterator[str]:
    hbm, free = planned.asked.instance.hbm_bytes_per_core, room(planned.asked.instance)
    yield f"a core: {size(hbm)} less {size(hbm - free)} for the runtime and the graphs' code"
    yield "at most: weights and KV cache read once a token at the whole memory bandwidth"
    yield f"expected: {basis(planned.geometry)}"
    yield ""


def _layers(planned: Planned) -> None:
    """One row a kind of layer and placement."""
    groups: dict[tuple[object, ...], int] = {}
    for layer in planned.chosen.plan.layers:
        key = (
            layer.kind,
            layer.placement,
            layer.query_heads_per_rank,
            layer.kv_heads_per_rank,
            layer.head_dim,
        )
        groups[key] = groups.get(key, 0) + 1
    table(
        "layers, heads of one rank",
        ("kind", "layers", "attention", "query heads", "KV heads", "head_dim"),
        [(key[0], count, *key[1:]) for key, count in groups.items()],
    )


def _host(host: HostPeaks) -> None:
    """The four ways through the host's memory and what fits of them."""
    name, largest = host.compilers[0]
    rows = [
        ("usual tools: all ranks at once in float32", host.all_ranks_float32),
        ("usual tools: one rank, checkpoint in float32", host.one_rank_float32),
        ("this toolkit: streamed in bfloat16", host.streamed),
        (f"compiler, each process (most: {name})", largest),
        (f"compilers, {host.at_once} of {len(host.compilers)} graphs at once", host.compiling),
    ]
    table(
        f"host memory, {size(host.budget)} to use",
        ("way", "peak", "fits"),
        [(way, size(peak), "yes" if peak <= host.budget else "no") for way, peak in rows],
    )
    emit_lines(
        wrapped(
            [
                f"to use: {host.origin}",
                "usual tools: seen with the 31B at tp 8 were over 300 GB (killed) and 182 GB",
                "compiler: from three published runs of neuronx-cc, no promise",
                "",
            ]
        )
    )


def _idle(planned: Planned) -> Iterator[str]:
    """Idle cores and what would use them: what works, and of what does not the largest degrees."""
    cores, tp = planned.asked.instance.cores, planned.chosen.plan.tp
    if not planned.idle_cores:
        return
    yield f"{planned.idle_cores} of {cores} cores stay idle at tp {tp}"
    works = [use for use in planned.idle_uses if use.works]
    fails = [use for use in planned.idle_uses if not use.works][-2:]
    for use in (*works, *fails):
        yield f"  {_use(use)}"


def _use(use: IdleUse) -> str:
    times = f" x {use.replicas}" if use.replicas > 1 else ""
    return f"{use.model} at tp {use.tp}{times}: {use.reason}"


def _compile_time(found: CompileTime) -> Iterator[str]:
    run = found.run
    which = "this model" if found.same_size else f"gemma-4-{run.size}, the nearest published"
    low, high = found.usual_minutes
    yield (
        f"compiling took {run.minutes:.0f} min for {which} (tp {run.tp}, {run.instance}, {run.note}); spot "
        f"instances were kept {low} to {high} min, once {found.longest_minutes}"
    )
    if not found.fits_usual_window:
        yield f"  cheaper: {found.route}"


def wrapped(lines: list[str]) -> Iterator[str]:
    """Lines broken at `WIDTH` columns, continuations indented by two more."""
    import textwrap

    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [
            ""
        ]
