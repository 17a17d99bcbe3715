"""A run's checkpoints: one folder a step, each a committed set. Recovery lists markers and checks digests.

In: a folder. Out: the newest step whose files are what was committed. What was never committed is removed; what was
committed and is no longer whole is named, removed, and the one before it used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, ValidationError

from gemma_neuron.artifacts import (
    CommittedSet,
    FileEntry,
    Manifest,
    digest_bytes,
    remove,
    sync_folder,
    write_atomic,
)
from gemma_neuron.errors import IntegrityError

STEM = "checkpoint"
FOLDER = re.compile(r"step-(\d{8,12})")
ADAPTER_FILE = "adapter.safetensors"
TRAINING_FILE = "training.safetensors"
"""exp_avg and exp_avg_sq of the optimiser, float32 [parameters]; losses, float32 [steps]."""
STATE_FILE = "state.json"
"""Step, position in the data, learning rate, random state."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for another name."""
    found = FOLDER.fullmatch(name)
    return int(found[1]) if found is not None and folder_name(int(found[1])) == name else None


def write_checkpoint(folder: Path, files: Mapping[str, bytes], facts: dict[str, Any]) -> None:
    """Write and commit one checkpoint: files beside and renamed, manifest, marker last. Raises DiskFullError."""
    committed = CommittedSet(folder, STEM)
    if committed.marker_path.exists():
        return  # an earlier attempt came as far; the run is the same, and so is the state
    remove(folder)
    folder.mkdir(parents=True)
    sync_folder(folder.parent)
    entries = []
    for name, data in files.items():
        write_atomic(folder / name, data)
        entries.append(FileEntry(name=name, bytes=len(data), blake3=digest_bytes(data)))
    committed.commit_entries(tuple(entries), facts)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery found. `step`: the newest good checkpoint's, 0 for the very beginning; `refused`: step → why."""

    step: int
    facts: dict[str, Any]
    refused: dict[int, str]
    partial: tuple[str, ...]


class Facts(BaseModel):
    """What a checkpoint says of itself. `run`: digest of the run's record; the rest as the replicas had it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    step: int
    run: str
    threads: Annotated[int, Ge(1)]
    numerics: dict[str, str]


class Checkpoints:
    """The checkpoints under `folder`; nobody writes there while `recover` or `prune` runs.

    `run`: digest of the record whose checkpoints they have to be; None takes whose they are.
    """

    def __init__(self, folder: Path, run: str | None = None) -> None:
        self.folder, self._run = folder, run

    def at(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def set_of(self, step: int) -> CommittedSet:
        return CommittedSet(self.at(step), STEM)

    def committed(self) -> list[int]:
        """Steps that have a marker, newest first; listed anew."""
        return sorted(
            (step for step in self._steps() if self.set_of(step).marker_path.is_file()),
            reverse=True,
        )

    def is_committed(self, step: int) -> bool:
        return self.set_of(step).marker_path.is_file()

    def recover(self) -> Recovered:
        """The newest checkpoint whose digests hold; partial and refused ones are removed."""
        partial = []
        for step in self._steps():
            if not self.is_committed(step):
                partial.append(folder_name(step))
                remove(self.at(step))
        refused: dict[int, str] = {}
        for step in self.committed():
            try:
                manifest = self.set_of(step).verify()
                self._require_own(step, manifest)
                return Recovered(step, manifest.facts, refused, tuple(partial))
            except IntegrityError as error:
                refused[step] = error.message
                self.drop(step)
        return Recovered(0, {}, refused, tuple(partial))

    def _require_own(self, step: int, manifest: Manifest) -> None:
        """Raise IntegrityError for a checkpoint that was copied here from another run or step."""
        if self._run is None:
            return
        try:
            found = Facts.model_validate(manifest.facts)
        except ValidationError as error:
            raise IntegrityError(
                f"{self.at(step)} does not say what it is: {error.errors()[0]['msg']}.",
                "It is removed.",
            ) from error
        if (found.run, found.step) != (self._run, step):
            raise IntegrityError(
                f"{self.at(step)} holds step {found.step} of run {found.run[:16]}; step {step} of "
                f"{self._run[:16]} is needed.",
                "It is removed.",
            )

    def manifest(self, step: int) -> Manifest | None:
        return self.set_of(step).manifest()

    def drop(self, step: int) -> None:
        """Remove a checkpoint, its marker first."""
        self.set_of(step).withdraw()
        remove(self.at(step))

    def prune(self, keep: int) -> None:
        """Keep the newest `keep`."""
        for step in self.committed()[keep:]:
            self.drop(step)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (step_of(path.name) for path in self.folder.iterdir() if path.is_dir())
        return [step for step in found if step is not None]
