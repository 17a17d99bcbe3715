"""Find a back end by name: imported late, and never another one in its place."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from gemma_neuron.errors import UsageError

if TYPE_CHECKING:
    from gemma_neuron.backends.base import Backend

MODULES = {
    "cpu": "gemma_neuron.backends.cpu.backend",
    "neuron": "gemma_neuron.backends.neuron.backend",
}


def backend(name: str) -> Backend:
    """The back end called `name`. Raises UsageError for an unknown one."""
    if name not in MODULES:
        near = difflib.get_close_matches(name, MODULES, n=1, cutoff=0.0)
        raise UsageError(
            f"There is no back end {name!r}; there are {', '.join(MODULES)}.",
            f"Did you mean --backend {near[0]}?",
        )
    found: Backend = importlib.import_module(MODULES[name]).BACKEND
    return found
