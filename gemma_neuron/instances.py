"""The instances a plan can be made for: cores, memory and bandwidth, from `data/instances.json`."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gemma_neuron.errors import UsageError

DEFAULT_INSTANCE = "inf2.24xlarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type. A core is a NeuronCore (a logical one, LNC 2, on Trainium2)."""

    name: str
    chip: str
    neuroncore: str
    """Generation of the cores: NeuronCore-v2 (Inferentia2, Trainium1) or NeuronCore-v3 (Trainium2)."""
    chips: int
    cores: int
    vcpu: int | None
    host_gib: int
    hbm_gib_per_core: int
    hbm_gib_s_per_core: float
    tp_possible: tuple[int, ...]
    """Degrees that AWS's pages list or that were reported to run there."""
    tp_note: str
    """What is doubtful about `tp_possible`, or empty."""

    @property
    def hbm_bytes_per_core(self) -> int:
        return self.hbm_gib_per_core * 2**30

    @property
    def hbm_bytes_s_per_core(self) -> float:
        return self.hbm_gib_s_per_core * 2**30

    @property
    def host_bytes(self) -> int:
        return self.host_gib * 2**30


@cache
def instances() -> dict[str, Instance]:
    text = resources.files("gemma_neuron.data").joinpath("instances.json").read_text()
    rows = json.loads(text)["instances"]
    return {
        row["name"]: Instance(**row | {"tp_possible": tuple(row["tp_possible"])}) for row in rows
    }


def instance(name: str) -> Instance:
    """The instance called `name`. Raises UsageError with the nearest name."""
    known = instances()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"There is no instance {name!r} in the table; it has {', '.join(known)}.",
            f"Did you mean --instance {near}?",
        )
    return known[name]
