"""What a port's ledger and committed units say: whether a unit can be reused, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from gemma_neuron.artifacts import Manifest, digest_json
from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.errors import IntegrityError
from gemma_neuron.port import Outcome, Port


@dataclass(frozen=True, slots=True)
class Found:
    """A unit's committed manifest facts, verified; `problem` says why they cannot be used."""

    shortcut: str
    key_digest: str
    key: dict[str, str]
    problem: str = ""


def committed(port: Port, unit: UnitSpec) -> Found | None:
    """The unit's committed artefact, its digests checked; None when there is none."""
    unit_set = port.unit_set(unit)
    try:
        if unit_set.manifest() is None:
            return None
        facts = unit_set.verify().facts
    except IntegrityError as error:
        return Found("", "", {}, problem=error.message)
    try:
        said = Facts.model_validate(facts)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        return Found(
            "", "", {}, problem=f"its manifest does not say what it was built from: {where}"
        )
    if said.key.get("shape") != unit.name:
        return Found("", "", {}, problem="its folder holds another unit")
    return Found(said.shortcut, said.key_digest, said.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a unit took. `host_model_bytes`: what the back end's model says of its peak, so that later predictions can
    be corrected by the two."""

    life: int
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    host_peak_bytes: NonNegativeInt = 0
    host_model_bytes: NonNegativeInt = 0


class Facts(BaseModel):
    """What a unit's manifest says of it. It may come from a bucket, so it is read like anything from outside."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    shortcut: str
    key_digest: str
    key: dict[str, str]
    built: Taken


def artefact_digest(manifest: Manifest) -> str:
    """Names a unit's files, whatever is said about them later (a shortcut key taken anew)."""
    return digest_json([entry.model_dump() for entry in manifest.files])


def settle(port: Port, units: Iterable[UnitSpec]) -> None:
    """Append the `built` line of a unit whose process was killed between its marker and that line.

    What such a line says stands in the unit's manifest too, so each artefact has exactly one.
    """
    known = [line.get("digest") for line in port.ledger() if line.get("outcome") == "built"]
    for unit in units:
        try:
            manifest = port.unit_set(unit).manifest()
            if manifest is None or artefact_digest(manifest) in known:
                continue
            said = Facts.model_validate(manifest.facts)
        except (IntegrityError, ValidationError):
            continue  # it does not count, and is built again
        record(port, unit, "built", said.built, key=said.key, key_digest=said.key_digest)


def life(port: Port) -> int:
    """1 for the first process that works on a port, one more for each later one."""
    lives = [line.get("life") for line in (*port.ledger(), *port.events())]
    return max((n for n in lives if isinstance(n, int)), default=0) + 1


def record(
    port: Port,
    unit: UnitSpec,
    outcome: Outcome,
    taken: Taken,
    *,
    key: dict[str, str],
    key_digest: str,
) -> None:
    """Append a committed unit's line. `key`: digest of its key; `digest`: of its files."""
    manifest = port.unit_set(unit).manifest()
    assert manifest is not None, f"{unit.name} has no marker"
    facts = {"key": key_digest, "fields": key, "digest": artefact_digest(manifest)}
    port.append("ledger.jsonl", {"unit": unit.name, "outcome": outcome} | asdict(taken) | facts)


def record_failure(port: Port, unit: UnitSpec, why: str, taken: Taken) -> None:
    """Append the line of a unit that was given up; its peak is 0 unless memory was the reason."""
    outcome: Outcome = "failed"
    facts = {"unit": unit.name, "outcome": outcome, "why": why}
    port.append("ledger.jsonl", facts | asdict(taken))


def why_missed(port: Port, unit: UnitSpec, key: dict[str, str], found: Found | None) -> str:
    """One line: which field of the key differs from the nearest entry there is."""
    if found is not None and found.problem:
        return found.problem
    entries = [found.key] if found is not None and found.key else _entries(port, unit.phase)
    if not entries:
        return "no entry yet"
    nearest = max(entries, key=lambda entry: sum(entry.get(k) == v for k, v in key.items()))
    differing = [
        f"{name} {_short(nearest.get(name, 'none'))} -> {_short(value)}"
        for name, value in key.items()
        if nearest.get(name) != value
    ]
    return "differs from the nearest entry in " + (
        ", ".join(differing) or "nothing: its files are gone"
    )


def _entries(port: Port, phase: str) -> list[dict[str, Any]]:
    """Keys of units of that phase this port built before."""
    return [
        line["fields"]
        for line in port.ledger()
        if line.get("outcome") == "built"
        and str(line.get("unit", "")).startswith(phase)
        and isinstance(line.get("fields"), dict)
        and all(isinstance(value, str) for value in line["fields"].values())
    ]


def _short(value: str) -> str:
    """Digests are cut to 12 characters; everything else is shown whole."""
    digest = len(value) == 64 and all(c in "0123456789abcdef" for c in value)
    return value[:12] if digest else value
