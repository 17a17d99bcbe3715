"""How much host memory and time a unit will take: the back end's model, corrected by what the ledger saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from gemma_neuron.backends.base import Backend, PortPart
from gemma_neuron.elastic.notice import NOTICE_SECONDS
from gemma_neuron.port import Port

MARGIN = 1.05
"""On a peak that was measured: peaks of the same unit differ by 1 to 3 % from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One unit. `host_bytes`: peak of its worker and all it starts; `model_bytes`: the same by the back end's model
    alone; `seconds`: how long it, or the slowest unit like it, took before; None where nothing was built yet."""

    host_bytes: int
    model_bytes: int
    seconds: float | None

    @property
    def long(self) -> bool:
        """Whether a spot notice would not leave it the time to end, as far as is known."""
        return self.seconds is None or self.seconds > NOTICE_SECONDS


def predict(parts: Sequence[PortPart], backend: Backend) -> dict[str, Prediction]:
    """Unit name → prediction.

    A unit that was built here before takes what it took then; of one that failed for want of memory that is only known
    to be too little. For any other the model counts, times the largest ratio of peak to model that was seen with a unit
    of its phase, or else of any.
    """
    found = {}
    for part in parts:
        name, model = part.unit.name, backend.host_bytes(part)
        lines = _measured(part.port)
        own = [line for line in lines if line.unit == name]
        alike = [line for line in lines if line.unit.startswith(part.unit.phase)] or lines
        ratio = max((line.host_peak_bytes / line.host_model_bytes for line in alike), default=1)
        bytes_ = MARGIN * own[-1].host_peak_bytes if own else ratio * model
        if own and own[-1].outcome == "failed":
            bytes_ = max(bytes_, model)
        seconds = max((line.seconds for line in own or alike), default=None)
        found[name] = Prediction(host_bytes=int(bytes_), model_bytes=model, seconds=seconds or None)
    return found


class Measured(BaseModel):
    """A ledger line that holds a unit's peak and what the model said of it. The ledger may come from a bucket: lines
    that say something else are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    unit: str
    outcome: Literal["built", "failed"]
    host_peak_bytes: PositiveInt
    host_model_bytes: PositiveInt
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


def _measured(port: Port) -> list[Measured]:
    lines = []
    for line in port.ledger():
        with suppress(ValidationError):
            lines.append(Measured.model_validate(line))
    return lines
