"""Members with the signatures NxD was recorded with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gemma_neuron.backends.neuron.sdk import calls

ROOT = "neuronx_distributed"
KINDS = {
    name: getattr(inspect.Parameter, name.upper())
    for name in (
        "positional_only",
        "positional_or_keyword",
        "keyword_only",
        "var_positional",
        "var_keyword",
    )
}
MEMBERS: dict[str, Any] = {}


def recorded(name: str) -> Callable[[Any], Any]:
    """Give a function, or a class's constructor, the recorded signature `name` and bind every call to it."""
    signature = inspect.Signature(
        [
            inspect.Parameter(
                parameter, KINDS[kind], default=None if default else inspect.Parameter.empty
            )
            for parameter, kind, default in calls()[f"{ROOT}.{name}"]["parameters"]
        ]
    )

    def bound(target: Any) -> Any:
        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            return target(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def keep(member: Any) -> Any:
        if inspect.isclass(member):
            constructor: Any = member
            constructor.__init__ = bound(constructor.__init__)
            found = member
        else:
            found = bound(member)
        MEMBERS.setdefault(name, found)
        return found

    return keep
