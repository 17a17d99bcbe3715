"""What `tune` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_neuron.render import size

if TYPE_CHECKING:
    from gemma_neuron.tuning.plan import Tuned


def lines(found: Tuned) -> list[str]:
    """What came out, what it cost, what comes next."""
    said = [
        f"adapter in {found.out}: {found.parameters:,} parameters, {found.steps} steps, "
        f"last loss {found.final_loss:.4f}",
    ]
    if found.replicas:
        said.append(
            f"{found.samples_per_second:.1f} samples/s on {found.replicas} replica{'s' * (found.replicas != 1)}, "
            f"peak {size(found.peak_bytes)} each; {found.restarts} restarts, {found.lost_steps} steps lost, "
            f"{found.downtime_seconds:.1f} s down"
        )
    return [*said, f"digest {found.digest}"]
