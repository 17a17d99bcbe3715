"""What `plan` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_neuron.render import emit_lines, size
from gemma_neuron.render.table import table

if TYPE_CHECKING:
    from gemma_neuron.sharding.planner import Candidate, Planned


def show_plan(planned: Planned) -> None:
    """What was chosen and why, the candidates side by side, then one row a kind of layer."""
    chosen, instance = planned.chosen, planned.instance
    emit_lines(
        [
            f"{chosen.plan.strategy} at tp {chosen.plan.tp} on {instance.name}: "
            f"{size(chosen.bytes.total)} a core of {instance.hbm_gib_per_core} GiB",
            *(f"because {reason}" for reason in chosen.reasons),
        ]
    )
    columns = ("strategy", "fits", "weights/rank", "KV/rank", "scratch", "total", "bound tok/s")
    table(
        f"candidates, {planned.slots} slots of {planned.context}, {planned.dtype}",
        columns,
        [_candidate_row(c) for c in planned.candidates],
    )
    groups: dict[tuple[object, ...], int] = {}
    for layer in chosen.plan.layers:
        key = (
            layer.kind,
            layer.placement,
            layer.query_heads_per_rank,
            layer.kv_heads_per_rank,
            layer.head_dim,
        )
        groups[key] = groups.get(key, 0) + 1
    table(
        "layers",
        ("kind", "layers", "attention", "query heads/rank", "KV heads/rank", "head_dim"),
        [(key[0], count, *key[1:]) for key, count in groups.items()],
    )
    if planned.idle_cores:
        emit_lines(
            [f"{planned.idle_cores} of {instance.cores} cores stay idle at tp {chosen.plan.tp}"]
        )


def _candidate_row(candidate: Candidate) -> tuple[object, ...]:
    used = candidate.bytes
    return (
        candidate.plan.strategy,
        "yes" if candidate.fits else "no",
        size(used.weights),
        size(used.kv),
        size(used.scratch),
        size(used.total),
        f"{candidate.bound_tokens_per_second:.1f}",
    )
