"""A replica of `tune` on a machine that shares no disk with the controller's: how its worker finds the model.

It is opened by the name it has on the controller's machine: a folder that is there too, a hub id at the same commit, an
s3:// URI. A machine whose checkpoint or packages are others is refused by its name.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.errors import EnvironmentProblem, GemmaNeuronError
from gemma_neuron.pipeline.away import persistently
from gemma_neuron.pipeline.sources import UNWATCHED, fetched
from gemma_neuron.tuning import away
from gemma_neuron.tuning.worker import LOAD_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A model as any machine finds it: `text` to open it by, and the audit's digest."""

    text: str
    digest: str


def load_away(origin: Origin, context: WorkerContext, order: away.Order) -> away.Arrived:
    """Run in a worker. Raises EnvironmentProblem where this machine would train something else than the controller's,
    or cannot have the model."""
    context.phase("finding the model", LOAD_SECONDS)
    away.require_same_versions(order.versions)
    return away.load(context, _model(origin, context), order)


def _model(origin: Origin, context: WorkerContext) -> Path:
    """The folder of the model on this machine, fetched where it has to be."""
    try:
        source, audit = persistently(
            context, "fetching the model", lambda: fetched(origin.text, UNWATCHED)
        )
    except GemmaNeuronError as error:
        raise EnvironmentProblem(f"On {platform.node()}: {error.message}", error.hint) from error
    found = audit.report.checkpoint_digest
    if found != origin.digest:
        raise EnvironmentProblem(
            f"{origin.text} on {platform.node()} is another checkpoint than on the controller's machine: digest "
            f"{found[:16]} here, {origin.digest[:16]} there.",
            "Put the same checkpoint on all machines of the cluster.",
        )
    return source.folder
