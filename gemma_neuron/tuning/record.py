"""`tune.json`: which run a folder holds. Another run is refused; the same one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gemma_neuron.artifacts import (
    digest_json,
    remove,
    remove_partials,
    write_json_atomic,
)
from gemma_neuron.errors import IntegrityError, PortMismatchError
from gemma_neuron.tuning.recipe import Recipe

RECORD_NAME = "tune.json"
LOCK_NAME = ".lock"
EVENTS_NAME = "events.jsonl"
LOSSES_NAME = "losses.jsonl"
CHECKPOINTS = "checkpoints"
SCRATCH = ".run"
"""Samples and group stores of a running process; nothing in it outlives one."""
SAMPLES = "samples.safetensors"
FORMAT = 1
ID_DIGITS = 16


class RunRecord(BaseModel):
    """What decides the adapter: base, samples, recipe. The rest says where they came from, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    base: str
    """The audit's digest of the checkpoint; empty while it is not known, which takes its weights."""
    samples: str
    """Digest of the tokenised samples with what of them is learned: template and tokenizer are in it."""
    recipe: Recipe
    model: str = ""
    data: str = ""
    versions: dict[str, str] = {}

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={"base", "samples", "recipe"})

    @property
    def digest(self) -> str:
        return digest_json(self.identity())

    @property
    def id(self) -> str:
        """The run's folder in a mirror."""
        return self.digest[:ID_DIGITS]


def require_own(out: Path) -> None:
    """Raise PortMismatchError where `out` holds something that `tune` did not begin."""
    if not out.is_dir() or (out / RECORD_NAME).is_file():
        return
    if any(found.name != LOCK_NAME for found in out.iterdir()):
        raise PortMismatchError(
            f"--out {out} holds files but no {RECORD_NAME}: it is no adapter that `tune` began.",
            "Name a new folder.",
        )


def open_folder(out: Path, record: RunRecord) -> None:
    """Make `out` this run's, or find that it is. The caller holds its lock.

    Raises PortMismatchError when it holds something else, IntegrityError when its record is unreadable.
    """
    require_own(out)
    require_same(out, record)
    path = out / RECORD_NAME
    if not path.is_file():
        write_json_atomic(path, record.model_dump(mode="json"))
    remove_partials(out)
    remove(out / SCRATCH)
    (out / SCRATCH).mkdir()
    (out / CHECKPOINTS).mkdir(exist_ok=True)


def require_same(out: Path, record: RunRecord) -> None:
    """Raise PortMismatchError where `out` holds another run, as far as `record` knows, IntegrityError where its own
    record is unreadable."""
    path = out / RECORD_NAME
    if not path.is_file():
        return
    try:
        found = RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise IntegrityError(
            f"{path} is not readable: {error.errors()[0]['msg']}.", "Name a new folder."
        ) from error
    had, now = _flat(found), _flat(record)
    for field, value in now.items():
        if value != "" and had.get(field) != value:
            raise PortMismatchError(
                f"--out {path.parent} holds another run: its {field} is {had.get(field)}, asked for is {value}.",
                "Name a new folder, or give the arguments the run was begun with.",
            )


def _flat(record: RunRecord) -> dict[str, Any]:
    identity = record.identity()
    return {**identity.pop("recipe"), **{name: text[:16] for name, text in identity.items()}}
