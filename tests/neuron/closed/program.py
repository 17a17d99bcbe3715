"""A loaded executable on all ranks of one process: interpreted once, then repeated from a record of its calls.

The ranks are an axis that `vmap` maps: a value that all of them share is computed once, a collective joins the axis.
What was called below `vmap` is recorded, so that later runs call the same operators on all ranks at once
without an interpreter. What follows from weights alone is kept from the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.neuron.closed.neff import execute
from tests.neuron.closed.recorder import Node, Recorder, nodes_of


class _Changing(Recorder):
    """Records what differs between runs: what follows from the inputs, and what makes a tensor out of none."""

    def wanted(self, call: Node, result: Any) -> bool:
        tensors = any(isinstance(a, (Tensor, Node)) for a in _flat(call.args))
        if not tensors or call.operands():
            return True
        function: Any = call.function
        assert not function._schema.is_mutable, f"{function} changes a value that is kept"
        return False


def _flat(args: list[Any]) -> list[Any]:
    return [part for a in args for part in (a if isinstance(a, list) else [a])]


@dataclass(slots=True)
class Step:
    """One call. `holes`: argument number → slot, or a list of slots and constants."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    holes: list[tuple[int, Any]]
    result: int
    dead: list[int] = field(default_factory=list)
    """Slots nobody reads after this call."""


class _Slot(int):
    """Number of a value that differs between runs."""


class Program:
    """`module` on `ranks` ranks. `held`: its weights and states, [ranks, …] where `axes` says 0, shared where None.

    `kept`: which of `held` never change while the program is loaded.
    """

    def __init__(
        self,
        module: Any,
        ranks: int,
        held: Sequence[Tensor],
        axes: Sequence[int | None],
        kept: Sequence[bool],
    ) -> None:
        self._module, self._ranks, self._axes = module, ranks, axes
        self._held = list(held)
        self._changing = [t for t, fixed in zip(held, kept, strict=True) if not fixed]
        self._steps: list[Step] | None = None
        self._results: list[Any] = []

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All results, [ranks, …] each."""
        if self._steps is None:
            return self._first(inputs)
        return self._again(self._steps, [*inputs, *self._changing])

    def _first(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        def one_rank(*given: Tensor) -> list[Tensor]:
            return execute(self._module, given, self._ranks)

        over_ranks = torch.func.vmap(one_rank, in_dims=(*[None] * len(inputs), *self._axes))
        recorder = _Changing([*inputs, *self._changing])
        with recorder:
            results: list[Tensor] = over_ranks(*inputs, *self._held)
        slots = {node: _Slot(i) for i, node in enumerate([*recorder.inputs, *recorder.nodes])}
        places = [recorder.node(tensor) for tensor in results]
        self._results = [slots[p] if isinstance(p, Node) else p for p in places]
        self._steps = [_step(node, slots) for node in recorder.nodes]
        read: set[int] = {p for p in self._results if isinstance(p, _Slot)}
        for step, node in zip(reversed(self._steps), reversed(recorder.nodes), strict=True):
            used: set[int] = {slots[operand] for operand in node.operands()} | {step.result}
            step.dead, read = sorted(used - read), read | used
        return results

    def _again(self, steps: list[Step], given: list[Tensor]) -> list[Tensor]:
        values: dict[int, Any] = dict(enumerate(given))
        for step in steps:
            args = step.args.copy()
            for i, hole in step.holes:
                args[i] = values[hole] if type(hole) is _Slot else _filled(hole, values)
            values[step.result] = step.function(*args, **step.kwargs)
            for number in step.dead:
                del values[number]
        return [values[p] if isinstance(p, _Slot) else p for p in self._results]


def _step(node: Node, slots: dict[Node, _Slot]) -> Step:
    assert node.function is not None and not any(map(list, map(nodes_of, node.kwargs.values())))
    holes = [(i, _placed(a, slots)) for i, a in enumerate(node.args) if any(nodes_of(a))]
    return Step(node.function, node.args, node.kwargs, holes, slots[node])


def _placed(argument: Any, slots: dict[Node, _Slot]) -> Any:
    if isinstance(argument, list):
        return [_placed(part, slots) for part in argument]
    return slots[argument] if isinstance(argument, Node) else argument


def _filled(hole: list[Any], values: dict[int, Any]) -> list[Any]:
    return [values[p] if isinstance(p, _Slot) else p for p in hole]
