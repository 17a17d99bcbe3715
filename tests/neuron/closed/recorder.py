"""Operators as they are called, recorded below everything that decomposes or batches them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False, slots=True)
class Node:
    """A call, or an input (`function` None). Arguments that were tensors are the nodes they came from, or stay."""

    function: Callable[..., Any] | None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    """What it gave while it was recorded."""

    def operands(self) -> list[Node]:
        """Nodes among the arguments, each once, in order."""
        found: dict[Node, None] = {}
        for argument in (*self.args, *self.kwargs.values()):
            found |= dict.fromkeys(nodes_of(argument))
        return list(found)


def nodes_of(argument: Any) -> Iterator[Node]:
    for part in argument if isinstance(argument, list) else [argument]:
        if isinstance(part, Node):
            yield part


class Recorder(TorchDispatchMode):
    """`nodes` are the calls so far; `inputs` the nodes of the tensors it was made with."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self._known: dict[int, Node] = {}
        self._alive: list[Tensor] = []
        self.inputs = [self._note(tensor, Node(None, value=tensor)) for tensor in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its whole compiler, a second's work, to keep it away from this class."""
        return False

    def node(self, tensor: Tensor) -> Node | Tensor:
        """Where a tensor came from; itself when that was not recorded."""
        return self._known.get(id(tensor), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = Node(
            func, [self._seen(a) for a in args], {k: self._seen(v) for k, v in kwargs.items()}
        )
        if self.wanted(call, result):
            self._add(call, result)
        return result

    def wanted(self, call: Node, result: Any) -> bool:
        """Whether to keep the call. Its answer is otherwise as unknown as a tensor from outside."""
        return True

    def rebind(self, tensor: Tensor, node: Node) -> None:
        """From here on, `tensor` is what `node` gave."""
        self._note(tensor, node)

    def _add(self, call: Node, result: Any) -> None:
        call.value = result
        self.nodes.append(call)
        if isinstance(result, Tensor):
            self._note(result, call)
            return
        for i, part in enumerate(result):
            self.nodes.append(Node(operator.getitem, [call, i], value=part))
            self._note(part, self.nodes[-1])

    def _note(self, tensor: Tensor, node: Node) -> Node:
        self._alive.append(tensor)  # or its id would be another's
        self._known[id(tensor)] = node
        return node

    def _seen(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.node(argument)
        if isinstance(argument, (list, tuple)):
            return [self._seen(part) for part in argument]
        return argument
