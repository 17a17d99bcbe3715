"""What happened to a run, read from what it leaves in its folder: for the report, over all its processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import json_lines
from gemma_neuron.errors import IntegrityError
from gemma_neuron.tuning.checkpoints import Checkpoints
from gemma_neuron.tuning.history import History
from gemma_neuron.tuning.published import published
from gemma_neuron.tuning.record import CHECKPOINTS, EVENTS_NAME, LOSSES_NAME, RECORD_NAME, RunRecord

FAULTS = ("worker_died", "worker_hung")


@dataclass(slots=True, kw_only=True)
class Incident:
    """A fault, a notice, a growth or a refusal. `step`: the last that was done by then; None where not known (yet)."""

    time: float
    kind: str
    what: str
    step: int | None = None
    restored_step: int | None = None
    lost_steps: int | None = None
    replicas: int | None = None
    downtime_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """`losses[i]`: of step i + 1; `replicas[i]`: how many computed it, 0 where another machine did.

    `redone`: steps that were done more than once here; `unequal`: those of them that gave another loss then.
    """

    record: RunRecord
    losses: list[float]
    replicas: list[int]
    redone: int = 0
    unequal: int = 0
    incidents: list[Incident] = field(default_factory=list)
    done: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def read_story(out: Path) -> Story:
    """Raises IntegrityError when `out` holds no run."""
    path = out / RECORD_NAME
    if not path.is_file():
        raise IntegrityError(f"{out} has no {RECORD_NAME}.", "Name the folder of a `tune`.")
    record = RunRecord.model_validate_json(path.read_bytes())
    each = [line for line in json_lines(out / LOSSES_NAME) if "step" in line]
    lines = {line["step"]: line for line in each}
    values: dict[int, list[float]] = {}
    for line in each:
        values.setdefault(line["step"], []).append(line["loss"])
    again = [found for found in values.values() if len(found) > 1]
    losses = _curve(out)
    losses += [line["loss"] for step, line in sorted(lines.items()) if step > len(losses)]
    replicas = [int(lines.get(step, {}).get("replicas", 0)) for step in range(1, len(losses) + 1)]
    facts = published(out, record)
    return Story(
        record=record,
        losses=losses,
        replicas=replicas,
        redone=len(again),
        unequal=sum(len(set(found)) > 1 for found in again),
        incidents=list(_incidents(json_lines(out / EVENTS_NAME))),
        done=facts is not None,
        facts=facts or {},
    )


def _curve(out: Path) -> list[float]:
    """The losses up to the newest checkpoint, which knows those of other machines too."""
    checkpoints, history = Checkpoints(out / CHECKPOINTS), History(out)
    newest = next(iter(checkpoints.committed()), None)
    history.restore(None if newest is None else checkpoints.at(newest))
    return history.losses


def _incidents(events: Iterable[dict[str, Any]]) -> list[Incident]:
    found: list[Incident] = []
    open_: Incident | None = None
    started = 0
    for event in events:
        name, moment = event["event"], float(event.get("time", 0.0))
        if name in FAULTS:
            open_ = Incident(
                time=moment, kind="fault", what=str(event.get("why")), step=event["step"]
            )
            found.append(open_)
        elif name == "retry" and event.get("kind") == "scale_up":
            open_ = Incident(
                time=moment, kind="growth", what="a lost replica's place is used again"
            )
            found.append(open_)
        elif name == "started":
            started += 1
            if started > 1:
                open_ = Incident(time=moment, kind="start", what="started again")
                found.append(open_)
        elif name == "notice" and event.get("why"):
            found.append(Incident(time=moment, kind="notice", what=str(event["why"])))
        elif name == "checkpoint_refused":
            why = f"checkpoint refused: {event.get('why')}"
            found.append(Incident(time=moment, kind="refusal", what=why, step=event.get("step")))
        elif name == "numerics_changed":
            why = f"{event.get('before')} became {event.get('now')}"
            found.append(Incident(time=moment, kind="machine", what=why))
        elif name in ("restored", "resumed") and open_ is not None:
            _close(open_, event)
            open_ = None if name == "resumed" or open_.kind == "start" else open_
    return found


def _close(incident: Incident, event: dict[str, Any]) -> None:
    """Note how it went on: `restored` says from where, `resumed` what it cost."""
    incident.restored_step = event.get("restored_step", event.get("step"))
    incident.lost_steps = event.get("lost_steps")
    if event["event"] == "resumed":
        incident.replicas = event.get("replicas")
        incident.downtime_seconds = event.get("downtime_seconds")
    if incident.step is None:
        incident.step = incident.restored_step
