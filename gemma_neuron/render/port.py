"""What `shard`, `compile` and `doctor` show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemma_neuron.render import emit_lines, size
from gemma_neuron.render.table import table

if TYPE_CHECKING:
    from gemma_neuron.pipeline import PortResult


def show_port(result: PortResult, verb: str) -> None:
    """One line of what was done, one with the digest."""
    verified = (
        []
        if result.verified_tensors is None
        else [f"verified: {result.verified_tensors} tensors of all ranks equal the checkpoint"]
    )
    emit_lines(
        [
            f"{verb} {result.port}: {result.built} of {result.total} units built, {result.reused} reused, "
            f"{result.seconds:.1f} s, peak host memory {size(result.host_peak_bytes)}",
            *verified,
            f"digest {result.digest}",
        ]
    )


def show_checks(checks: Sequence[dict[str, str]]) -> None:
    """`doctor`: one row a check, then the remedies."""
    table(
        "",
        ("check", "status", "found", "needed"),
        [(c["name"], c["status"], c["found"], c["needed"]) for c in checks],
        numbers=False,
    )
    emit_lines(f"{c['name']}: {c['remedy']}" for c in checks if c["status"] != "ok" and c["remedy"])
