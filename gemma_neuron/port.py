"""A port is a folder: where its parts lie, its record, its ledger and its events (design section 4)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gemma_neuron.artifacts import (
    PARTIAL_SUFFIX,
    CommittedSet,
    append_json_line,
    begun_transfers,
    digest_json,
    json_lines,
    remove,
    remove_partials,
    write_json_atomic,
)
from gemma_neuron.backends.base import CompileSpec, UnitSpec
from gemma_neuron.errors import IntegrityError, PortIncompleteError, PortMismatchError
from gemma_neuron.plan import ShardPlan

if TYPE_CHECKING:
    from gemma_neuron.geometry import ModelGeometry

FORMAT_VERSION: Literal[1] = 1
RECORD_NAME = "port.json"
LOCK_NAME = ".lock"
VERDICT_NAME = "validation.json"
UNIT_STEM = "graph"
Outcome = Literal["built", "reused", "failed"]


class SourceRecord(BaseModel):
    """Where the checkpoint came from; `uri` is a path, hub id or s3:// URI as given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["folder", "hub", "s3"]
    uri: str
    revision: str = ""


class Fingerprints(BaseModel):
    """Digests that say which port this is. `template` is empty for a model without one; `prompt` covers tokenizer,
    generation config and template files, so that a verdict counts for the prompts it was given with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    checkpoint: str
    template: str
    prompt: str
    plan: str


class PortRecord(BaseModel):
    """`port.json`. `compile` is None until graphs were asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT_VERSION
    source: SourceRecord
    fingerprints: Fingerprints
    versions: dict[str, str]
    compile: CompileSpec | None = None
    warnings: tuple[str, ...] = ()
    """Audit warnings, shown at every later stage."""

    @property
    def digest(self) -> str:
        """Names the port: its fingerprints and what its graphs share."""
        return digest_json(
            {
                "fingerprints": self.fingerprints.model_dump(),
                "compile": self.model_dump()["compile"],
            }
        )


@dataclass(frozen=True)
class Port:
    """A port's folder. Reading raises PortIncompleteError when a part it needs is not there."""

    path: Path

    @cached_property
    def record(self) -> PortRecord:
        file = self.path / RECORD_NAME
        if not file.is_file():
            raise PortIncompleteError(
                f"{self.path} is no port: it has no {RECORD_NAME}.",
                "Make one with `gemma-neuron compile SOURCE --out PORT`.",
            )
        try:
            record = PortRecord.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise PortIncompleteError(
                f"{file} is not a port record of format {FORMAT_VERSION}: {error.error_count()} "
                f"problems, first {error.errors()[0]['loc']}: {error.errors()[0]['msg']}.",
                "Compile into a new folder.",
            ) from error
        return record

    @cached_property
    def plan(self) -> ShardPlan:
        try:
            plan = TypeAdapter(ShardPlan).validate_json(self._bytes("plan.json"))
        except ValidationError as error:
            raise self._unreadable("plan.json", error) from error
        if plan.fingerprint() != self.record.fingerprints.plan:
            raise IntegrityError(
                f"{self.path / 'plan.json'} is not the plan that {RECORD_NAME} names.",
                "Run `gemma-neuron compile` again with the same arguments.",
            )
        return plan

    @cached_property
    def geometry(self) -> ModelGeometry:
        from gemma_neuron.models.registry import read_geometry

        return read_geometry(json.loads(self._bytes("source/config.json")))

    @property
    def spec(self) -> CompileSpec:
        if self.record.compile is None:
            raise PortIncompleteError(
                f"{self.path} is sharded but not compiled.",
                "Run `gemma-neuron compile` with the same source and --out.",
            )
        return self.record.compile

    @property
    def source_folder(self) -> Path:
        return self.path / "source"

    @property
    def weights_folder(self) -> Path:
        return self.path / "weights"

    @property
    def golden_folder(self) -> Path:
        return self.path / "golden"

    def rank_file(self, rank: int) -> Path:
        return self.weights_folder / f"rank-{rank:02d}.safetensors"

    def rank_set(self, rank: int) -> CommittedSet:
        return CommittedSet(self.weights_folder, f"rank-{rank:02d}")

    def unit_folder(self, unit: UnitSpec) -> Path:
        return self.path / "graphs" / unit.name

    def unit_set(self, unit: UnitSpec) -> CommittedSet:
        return CommittedSet(self.unit_folder(unit), UNIT_STEM)

    @property
    def source_set(self) -> CommittedSet:
        """Config, tokenizer and template are part of the commit: an edited template is another model."""
        return CommittedSet(self.source_folder, "source")

    def contents_digest(self) -> str:
        """Names the port with its bytes: its record's digest, and every committed file of source, ranks and graphs.

        What is said about them (times, shortcut keys) does not count, nor do references and verdicts made later. Raises
        IntegrityError when a manifest is not what its marker vouches for.
        """
        graphs = () if self.record.compile is None else self.record.compile.units()
        ranks = sorted(path.stem for path in self.weights_folder.glob("*.committed"))
        sets = {
            "source": self.source_set,
            **{f"weights/{stem}": CommittedSet(self.weights_folder, stem) for stem in ranks},
            **{f"graphs/{unit.name}": self.unit_set(unit) for unit in graphs},
        }
        found = {name: part.manifest() for name, part in sets.items()}
        files = {
            f"{name}/{entry.name}": entry.blake3
            for name, manifest in found.items()
            if manifest is not None
            for entry in manifest.files
        }
        return digest_json({"port": self.record.digest, "files": files})

    def require_digest(self, expected: str) -> None:
        """Raise IntegrityError unless this is the port with that `contents_digest`; any port will do for ""."""
        found = self.contents_digest() if expected else ""
        if found != expected:
            raise IntegrityError(
                f"{self.path} is not the port that was asked for: its digest is {found}, --expect-digest {expected}.",
                "Its graphs are native code: do not load it unless you know who made it. Remove it, and ask whoever "
                "named the digest.",
            )

    def files(self) -> list[Path]:
        """What a verdict is about: records, source, rank files and graphs with their manifests and markers."""
        folders = self.source_folder, self.weights_folder, self.path / "graphs"
        found = [self.path / RECORD_NAME, self.path / "plan.json"]
        for folder in folders:
            found += sorted(path for path in folder.rglob("*") if path.is_file())
        return found

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the port (source.json, validation.json), or None. Raises IntegrityError."""
        file = self.path / name
        if not file.exists():
            return None
        if not file.is_file():
            raise self._unreadable(name, "it is no file")
        try:
            found = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(name, error) from error
        if not isinstance(found, dict):
            raise self._unreadable(name, "it holds no JSON object")
        return found

    def _unreadable(self, name: str, why: object) -> IntegrityError:
        first = str(why).splitlines()[0] if str(why) else type(why).__name__
        return IntegrityError(
            f"{self.path / name} is not readable: {first}.",
            f"Remove it and run the command that makes it again (`compile` or `validate {self.path}`).",
        )

    def write_record(self, record: PortRecord) -> None:
        write_json_atomic(self.path / RECORD_NAME, record.model_dump(mode="json"))
        self.__dict__.pop("record", None)

    def verdict(self) -> str | None:
        """The verdict of validation.json; None when this port, as it is now, was never validated.

        A report of another port or of other graphs than port.json names does not count. Raises IntegrityError
        when the file is no JSON.
        """
        found = self.read_json(VERDICT_NAME) or {}
        provenance = found.get("provenance")
        judged = provenance.get("port_digest") if isinstance(provenance, dict) else None
        verdict = found.get("verdict")
        return verdict if isinstance(verdict, str) and judged == self.record.digest else None

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append one JSON line with its time to `ledger.jsonl` or `events.jsonl`, fsynced."""
        append_json_line(self.path / name, line)

    def ledger(self) -> list[dict[str, Any]]:
        """All ledger lines; a last line torn by a crash is left out."""
        return json_lines(self.path / "ledger.jsonl")

    def events(self, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
        """All events, or those in the file's last bytes."""
        return json_lines(self.path / "events.jsonl", last_bytes=last_bytes)

    def _bytes(self, name: str) -> bytes:
        file = self.path / name
        if not file.is_file():
            raise PortIncompleteError(
                f"{self.path} has no {name}.",
                "Run `gemma-neuron compile` again with the same arguments.",
            )
        return file.read_bytes()


OWN_PARTS = ("", "source", "weights", "graphs", "golden")
FINGERPRINT_NAMES = {
    "checkpoint": "digest of the checkpoint's weights",
    "config": "digest of config.json",
    "template": "digest of the chat template",
    "prompt": "digest of tokenizer and generation config (an edited one gives other prompts or stops)",
    "plan": "plan",
}
FIRST_FILES = (LOCK_NAME, RECORD_NAME + PARTIAL_SUFFIX)
"""What a run that was killed at once may have left before there was a record."""


def remove_leftovers(path: Path, *, spare_transfers: bool = False) -> None:
    """Remove half-written parts of a port, in a port's own places only; `spare_transfers`: not begun downloads."""
    for part in OWN_PARTS:
        folder = path / part
        remove_partials(folder, spare=begun_transfers(folder) if spare_transfers else ())


def remove_transfers(path: Path) -> None:
    """Remove begun downloads of parts of a port that nobody goes on with."""
    for part in OWN_PARTS:
        for name in begun_transfers(path / part):
            remove(path / part / name)


def check_out_folder(path: Path, fingerprints: Fingerprints) -> None:
    """Refuse an `--out` that holds another port or something that is none, before anything is written."""
    if not path.exists():
        return
    if not path.is_dir():
        raise PortMismatchError(f"--out {path} is a file.", "Name a folder that is new or a port.")
    if not (path / RECORD_NAME).is_file():
        if any(found.name not in FIRST_FILES for found in path.iterdir()):
            raise PortMismatchError(
                f"--out {path} holds files but no {RECORD_NAME}: it is no port.",
                "Name a new folder.",
            )
        return
    found = Port(path).record.fingerprints
    for field in type(found).model_fields:
        had, now = getattr(found, field), getattr(fingerprints, field)
        not_read_yet = (
            field == "checkpoint" and not now
        )  # of a source that is still to be downloaded
        if had != now and not not_read_yet:
            raise PortMismatchError(
                f"--out {path} holds another port: its {FINGERPRINT_NAMES.get(field, field)} is "
                f"{had[:16] or 'none'}, this source and plan give {now[:16] or 'none'}.",
                "Name a new folder, or remove that one.",
            )
