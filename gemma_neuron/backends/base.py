"""What a back end is: probe, compile a unit, load a port; and what a loaded port can do.

`Runner` is the only way validation and serving reach a model. It knows token ids, slots and positions;
it knows nothing of text. All arrays are numpy on the host; logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

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
SCORE_LENGTH = 128
"""Positions scored at once: their logits are 1 MiB each in float32 (262,144 tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """Whether a back end can be used here; `reason` says why not, `facts` what was found."""

    name: str
    usable: bool
    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing `doctor` looked at: what was found, what is needed, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    needed: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One compiled part of a port: phase, rows B and columns L of its token input."""

    phase: str
    """prefill, decode or score; layout for what rewrites weights."""
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
    score_length: Annotated[int, Ge(1)] = SCORE_LENGTH
    layout: bool = False
    """The compiler chooses the weights' layout for decode, and every graph takes it (neuron only)."""

    def shared_digest(self, plan_fingerprint: str) -> str:
        """What every graph of a port must agree on to share weights and KV state."""
        facts = [plan_fingerprint, self.backend, self.dtype, self.slots, self.max_context]
        return digest_json([*facts, "layout"] if self.layout else facts)

    @property
    def decode_unit(self) -> UnitSpec:
        return UnitSpec(phase="decode", batch=self.slots, length=1)

    @property
    def layout_unit(self) -> UnitSpec:
        """What rewrites the weights of the rank files into the layout decode was compiled for."""
        return UnitSpec(phase="layout", batch=self.slots, length=1)

    def graphs(self) -> tuple[UnitSpec, ...]:
        """The model's graphs. Decode first: it is the one every run needs."""
        return (
            self.decode_unit,
            *(UnitSpec(phase="prefill", batch=1, length=n) for n in self.buckets),
            UnitSpec(phase="score", batch=1, length=min(self.score_length, self.max_context)),
        )

    def units(self) -> tuple[UnitSpec, ...]:
        """Everything that is compiled."""
        return tuple(unit for stage in self.stages() for unit in stage)

    def stages(self) -> tuple[tuple[UnitSpec, ...], ...]:
        """Units that may be compiled at once, stage by stage: with `layout` all others depend on decode's."""
        decode, *others = self.graphs()
        if not self.layout:
            return ((decode, *others),)
        return ((decode,), (self.layout_unit, *others))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPart:
    """One unit of a port, with all that decides it. `port`: where its rank files and other units lie."""

    geometry: ModelGeometry
    plan: ShardPlan
    spec: CompileSpec
    unit: UnitSpec
    port: Port


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a compile may not exceed. `stall_seconds`: without output and without work; `silence_seconds`: without
    a heartbeat while tracing or compiling, both of which call code that lets no other thread of the process run."""

    stall_seconds: float = 600.0
    silence_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltUnit:
    """What compiling one unit left in its folder."""

    key: dict[str, str]
    files: tuple[str, ...]
    host_peak_bytes: int


HostBytes = Callable[[PortPart], int]
"""See `Backend.host_bytes`."""


class TracedUnit(Protocol):
    """A traced graph: opaque but for its key (design section 4), every field that changes the artefact."""

    @property
    def unit(self) -> UnitSpec: ...
    @property
    def key(self) -> dict[str, str]: ...

    def dry_files(self) -> dict[str, bytes]:
        """File name → what `--dry-run` writes of it: the graph and the compiler's flags."""
        ...


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


@runtime_checkable
class KeepsPrefix(Protocol):
    """A runner whose slots may be continued from an earlier position, for prompts that begin alike.

    `ring`: positions that the shortest sliding layer's state holds, None where every layer holds the whole context.
    A slot in which more positions were written can be continued only after `restore`.
    """

    ring: int | None

    def save(self, slot: int) -> Any:
        """A copy of the slot's rings as they are now; None where the back end cannot make one."""
        ...

    def restore(self, slot: int, saved: Any) -> None:
        """Put back what `save` gave for this slot; all other state of the slot is left as it is."""
        ...


class Backend(Protocol):
    """One file (or folder) in `backends/`, found by name through the registry."""

    name: str
    optimises_layout: bool
    """Whether it has a `layout` unit (see CompileSpec)."""
    keeps_devices: bool
    """Whether a process that loaded a port holds devices until it ends, however it closes the port."""
    preload: tuple[str, ...]
    """Modules that every worker needs and that start no thread: loaded once, before workers are forked."""
    compile_preload: tuple[str, ...]
    """The same for workers that compile."""

    def probe(self) -> BackendStatus:
        """Whether this machine can use it, and why not."""
        ...

    def require(self) -> None:
        """Raise EnvironmentProblem when this machine cannot compile, before anything long starts."""
        ...

    def host_bytes(self, part: PortPart) -> int:
        """Predicted peak of host memory of the worker that traces and compiles this unit, with all it starts."""
        ...

    def inputs(self, part: PortPart) -> tuple[UnitSpec, ...]:
        """Other units of the port whose committed files this one's trace or compile reads."""
        ...

    def shortcut_key(self, part: PortPart) -> dict[str, str]:
        """What decides the graph without tracing it: our code, plan, shapes, versions, flags, host."""
        ...

    def trace(self, part: PortPart) -> TracedUnit:
        """The graph as it will be handed to the compiler, and its key."""
        ...

    def compile(self, traced: TracedUnit, folder: Path, limits: Limits) -> BuiltUnit:
        """Compile a traced unit into `folder` (files fsynced, uncommitted). Raises CompileError."""
        ...

    def require_room(self, port: Port, replicas: int) -> None:
        """Raise DoesNotFitError when this machine cannot hold so many replicas of the port, before any is loaded."""
        ...

    def load(self, port: Port, replica: int = 0) -> Runner:
        """A runner over a port's committed weights and graphs; `replica` counts those on this machine.

        Raises IntegrityError, or DoesNotFitError for a replica beyond what the machine holds.
        """
        ...

    def checks(self) -> list[Check]:
        """What `doctor` looks at for this back end, in the order a user would fix it."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of what compiles and runs, for `port.json`."""
        ...
