"""Tensors of a rank file that no checkpoint holds: the rank's number, and the rotary frequencies of each layer kind.

The frequencies are stock's to the last bit, so torch computes them, and importing torch takes a second of one core:
nothing beside a compile, but a fifth of what cutting 9 GB takes on a fast disk. So a child may do it while the
checkpoint is audited. A thread would not do: an import holds the interpreter's lock.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import get_args

from gemma_neuron.geometry import AttentionKind, ModelGeometry
from gemma_neuron.plan import PlannedParameter


class Derived:
    """The bytes of derived tensors. `frequencies`: of this geometry, perhaps begun already."""

    def __init__(self, geometry: ModelGeometry, frequencies: Frequencies | None = None) -> None:
        self.geometry = geometry
        self._asked = frequencies or Frequencies()
        self._frequencies: dict[str, bytes] | None = None

    def bytes(self, parameter: PlannedParameter, rank: int) -> bytes:
        if parameter.placement.kind == "rank":
            return rank.to_bytes(4, "little")
        if self._frequencies is None:
            self._frequencies = self._asked.of(self.geometry)
        return self._frequencies[parameter.name.split(".")[1]]


class Frequencies:
    """Asked once for a model's frequencies; a child is at work on them from `begin` on.

    Without `begin`, or when the child came to nothing, they are computed here.
    """

    def __init__(self) -> None:
        self._child: Connection | None = None

    def begin(self) -> Frequencies:
        """Start the child, unless torch is there already or other threads are: a fork takes their locks along."""
        if "torch" in sys.modules or threading.active_count() > 1:
            return self
        context = multiprocessing.get_context("fork")
        self._child, childs = context.Pipe()
        context.Process(target=_answer, args=(childs, self._child), daemon=True).start()
        childs.close()
        return self

    def of(self, geometry: ModelGeometry) -> dict[str, bytes]:
        """Layer kind → float32 [head_dim / 2], in little-endian bytes."""
        child, self._child = self._child, None
        if child is None:
            return _frequencies(geometry)
        with child:
            try:
                child.send(geometry)
                found: dict[str, bytes] = child.recv()
            except (OSError, EOFError):  # it was killed
                return _frequencies(geometry)
        return found


def _answer(pipe: Connection, parents: Connection) -> None:
    """The child: ends with its parent, whose end of the pipe it must not hold."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parents.close()
    gc.disable()  # a tenth of the import would go into looking for garbage that is not there
    import gemma_neuron.models.rotary  # noqa: F401  while the geometry is not known yet

    try:
        pipe.send(_frequencies(pipe.recv()))
    except (OSError, EOFError):
        return


def _frequencies(geometry: ModelGeometry) -> dict[str, bytes]:
    from gemma_neuron.models.rotary import inverse_frequencies

    layers = {kind: geometry.layer_of_kind(kind) for kind in get_args(AttentionKind)}
    return {
        kind: inverse_frequencies(geometry.rope[kind], layer.head_dim).numpy().tobytes()
        for kind, layer in layers.items()
        if layer is not None
    }
