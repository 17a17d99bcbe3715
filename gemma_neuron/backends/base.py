"""What a back end is: probe, compile a unit, load a port; and what a loaded port can do.

`Runner` is the only way validation and serving reach a model. It knows token ids, slots and positions;
it knows nothing of text. All arrays are numpy on the host; logits are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from annotated_types import Ge, MinLen

from gemma_neuron.artifacts import digest_json

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from gemma_neuron.geometry import ModelGeometry
    from gemma_neuron.plan import ShardPlan
    from gemma_neuron.port import Port


Dtype = Literal["bfloat16", "float32"]
"""What a port computes in. Not float16: Gemma's activations leave its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """Whether a back end can be used here; `reason` says why not, `facts` what was found."""

    name: str
    usable: bool
    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One graph of a port: phase, rows B and columns L of its token input."""

    phase: str
    """prefill, decode or score."""
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.phase}-b{self.batch}-l{self.length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSpec:
    """What all graphs of a port share. `dtype`: bfloat16 or float32, of weights and KV cache."""

    backend: str
    dtype: Dtype
    slots: Annotated[int, Ge(1)]
    max_context: Annotated[int, Ge(2)]
    buckets: Annotated[tuple[Annotated[int, Ge(2)], ...], MinLen(1)]
    """Ascending."""
    score_length: Annotated[int, Ge(1)] = 128

    def shared_digest(self, plan_fingerprint: str) -> str:
        """What every graph of a port must agree on to share weights and KV state."""
        facts = [plan_fingerprint, self.backend, self.dtype, self.slots, self.max_context]
        return digest_json(facts)

    def units(self) -> tuple[UnitSpec, ...]:
        """Decode first: it is the one every run needs."""
        return (
            UnitSpec(phase="decode", batch=self.slots, length=1),
            *(UnitSpec(phase="prefill", batch=1, length=n) for n in self.buckets),
            UnitSpec(phase="score", batch=1, length=min(self.score_length, self.max_context)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltUnit:
    """What compiling one unit left in its folder."""

    key: dict[str, str]
    files: tuple[str, ...]
    host_peak_bytes: int


class TracedUnit(Protocol):
    """A traced graph: opaque but for its key (design section 4), every field that changes the artefact."""

    @property
    def unit(self) -> UnitSpec: ...
    @property
    def key(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Per position of a scored chunk of n tokens: `logits` [n, vocab] float32, `logsumexp` [n] float32,
    `target_logprob` [n] float32 (log-probability of the target given there)."""

    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    target_logprob: NDArray[np.float32]


class Runner(Protocol):
    """A loaded port. Slots are rows of KV state; a sequence lives in one slot from position 0 on."""

    vocab: int
    slots: int
    max_context: int
    prefill_buckets: tuple[int, ...]
    score_length: int

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> NDArray[np.float32]:
        """Run one chunk (at most the largest bucket) at positions start… of `slot`.

        Returns the last token's logits, [vocab]. A chunk at start 0 begins a new sequence: what the slot
        held before is never seen.
        """
        ...

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> NDArray[np.float32]:
        """One token for every slot at once; row b is slot b. Inactive rows change no state.

        Returns [slots, vocab]; rows of inactive slots mean nothing.
        """
        ...

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], *, slot: int, start: int
    ) -> Scores:
        """As `prefill` for a chunk of at most `score_length`, with every position's logits."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One file (or folder) in `backends/`, found by name through the registry."""

    name: str

    def probe(self) -> BackendStatus:
        """Whether this machine can use it, and why not."""
        ...

    def require(self) -> None:
        """Raise EnvironmentProblem when this machine cannot compile, before anything long starts."""
        ...

    def shortcut_key(
        self, geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec, unit: UnitSpec
    ) -> dict[str, str]:
        """What decides the graph without tracing it: our code, plan, shapes, versions, flags, host."""
        ...

    def trace(
        self, geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec, unit: UnitSpec
    ) -> TracedUnit:
        """The graph as it will be handed to the compiler, and its key."""
        ...

    def compile(self, traced: TracedUnit, folder: Path) -> BuiltUnit:
        """Compile a traced unit into `folder` (files fsynced, uncommitted). Raises CompileError."""
        ...

    def load(self, port: Port) -> Runner:
        """A runner over a port's committed weights and graphs. Raises IntegrityError."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of what compiles and runs, for `port.json`."""
        ...
