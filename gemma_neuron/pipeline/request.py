"""What the stages are asked, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from gemma_neuron.backends.base import Dtype, Limits
from gemma_neuron.errors import UsageError

if TYPE_CHECKING:
    from gemma_neuron.mirror.background import MirrorOptions
    from gemma_neuron.sharding.candidates import StrategyChoice

DTYPES = get_args(Dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `plan` was asked. `host_memory`: bytes, None for what the instance has."""

    tp: int
    instance: str
    strategy: StrategyChoice
    max_context: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    host_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What `compile` was asked. None: the default of the model or of `compilation.buckets`."""

    out: Path
    backend: str
    tp: int
    strategy: StrategyChoice = "auto"
    dtype: str | None = None
    max_context: int | None = None
    slots: int | None = None
    buckets: tuple[int, ...] | None = None
    base: bool = False
    layout: bool = True
    """Let the compiler choose the weights' layout for decode, where the back end can."""
    limits: Limits | None = None
    host_memory: int | None = None
    """Bytes that may be used; None: what this machine or its container has, less a reserve."""
    mirror: MirrorOptions | None = None
    expect_digest: str = ""
    """`Port.contents_digest` that the result must have; empty for any."""
    cluster: str | None = None
    """Address of a Ray cluster whose machines compile the units; None: this one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortResult:
    """What `shard` and `compile` answer (JSON contract). `digest`: `Port.contents_digest`."""

    port: Path
    digest: str
    total: int
    built: int
    reused: int
    seconds: float
    host_peak_bytes: int
    output_bytes: int
    warnings: tuple[str, ...]
    unit_peaks: dict[str, int] = field(default_factory=dict)
    """Unit built now → peak bytes of host memory (`compile`)."""
    retries: int = 0
    downtime_seconds: float = 0.0
    """How long units waited for another try after a fault."""
    verified_tensors: int | None = None
    """Tensors that `shard --verify` compared with the checkpoint; None without it."""

    def to_json(self) -> dict[str, Any]:
        verified = (
            {} if self.verified_tensors is None else {"verified_tensors": self.verified_tensors}
        )
        return {
            "port": str(self.port),
            "digest": self.digest,
            "units": {"total": self.total, "built": self.built, "reused": self.reused},
            "seconds": round(self.seconds, 2),
            "host_peak_bytes": self.host_peak_bytes,
            "unit_peaks": self.unit_peaks,
            "retries": self.retries,
            "downtime_seconds": self.downtime_seconds,
            "output_bytes": self.output_bytes,
            "warnings": list(self.warnings),
            **verified,
        }


def run_dtype(asked: str | None, own: str) -> Dtype:
    dtype = asked or (own if own in DTYPES else "bfloat16")
    if dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype}: Gemma's activations leave float16's range; there are "
            f"{', '.join(DTYPES)}.",
            "Use --dtype bfloat16.",
        )
    return cast(Dtype, dtype)
