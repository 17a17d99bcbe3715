"""Whether a worker's machine is like its controller's: what it makes must not depend on where it is made."""

from __future__ import annotations

from collections.abc import Mapping

from gemma_neuron.errors import EnvironmentProblem

SHOWN = 60
"""Characters of a fact; a compiler's own version has more lines than a message should."""


def require_alike(otherwise: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem unless `here` has what `there`, the controller's facts by name, says.

    `otherwise`: what would be another than on the controller's machine, and on which, for the message's beginning.
    """
    differing = [
        f"{name} {here.get(name, 'none')[:SHOWN]} here, {value[:SHOWN]} there"
        for name, value in there.items()
        if here.get(name) != value
    ]
    if differing:
        raise EnvironmentProblem(
            f"{otherwise}: {'; '.join(differing)}.",
            "Install the same versions on all machines of the cluster, or take this one out of it.",
        )
