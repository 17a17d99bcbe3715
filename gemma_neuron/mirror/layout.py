"""How a port lies in a bucket.

    <prefix>/raw/<blake3>                       weight files of checkpoints, once per content, shared by ports
    <prefix>/<port id>/owner.json               who writes
    <prefix>/<port id>/blobs/<blake3>           files of the port, by content: never overwritten by others
    <prefix>/<port id>/<folder>/<stem>.manifest-<digest>.json, <stem>.committed   what makes files count, marker last

A set is what `artifacts.CommittedSet` is on disk. Its manifest here carries the local one word for word, and the
generation of the owner that wrote it. The port's loose files (port.json, ledger, verdict) are a set too, `port`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PositiveInt, StringConstraints, ValidationError

from gemma_neuron.artifacts import CommittedSet, Manifest, digest_bytes
from gemma_neuron.backends.base import UnitSpec
from gemma_neuron.errors import IntegrityError
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.store import Store
from gemma_neuron.names import is_plain_file_name
from gemma_neuron.port import RECORD_NAME, UNIT_STEM, Port

ID_DIGITS = 16
LOOSE_STEM = "port"
LOOSE_FILES = (
    RECORD_NAME, "plan.json", "audit.json", "source.json", "ledger.jsonl", "validation.json", "events.jsonl",
)  # fmt: skip
SETTLED_FILES = tuple(name for name in LOOSE_FILES if name != "events.jsonl")
"""What is worth mirroring anew when it changes; the events go along."""
MARKER_SUFFIX = ".committed"
OLD_MANIFEST_SUFFIX = ".manifest.json"
"""Of a manifest that was written over in place, in mirrors of earlier versions."""
READS = 3
"""Of a set that is being replaced while it is read."""
FOLDERS = re.compile(r"source|weights|golden|graphs/[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")
PUSH_AGAIN = "From a machine that has the port: `gemma-neuron mirror push --verify`."
ORDER = ("", "source", "weights", "graphs", "golden")
"""What a new machine needs first."""


def port_location(uri: str, port_id: str) -> S3Location:
    base = S3Location.parse(uri)
    return S3Location(base.bucket, base.key(port_id))


def raw_location(uri: str) -> S3Location:
    base = S3Location.parse(uri)
    return S3Location(base.bucket, base.key("raw"))


def port_id(digest: str) -> str:
    """A port's folder in a mirror: the first digits of its digest."""
    return digest[:ID_DIGITS]


def blob_key(blake3: str) -> str:
    return f"blobs/{blake3}"


@dataclass(frozen=True, slots=True, order=True)
class SetName:
    """Which set: its folder inside the port (empty for the loose files) and its stem."""

    folder: str
    stem: str

    @classmethod
    def of_marker(cls, key: str) -> SetName | None:
        """From a marker's key, when it is one that a port has; a bucket may hold anything."""
        path = PurePosixPath(key.removesuffix(MARKER_SUFFIX))
        folder = "" if str(path.parent) == "." else str(path.parent)
        if not key.endswith(MARKER_SUFFIX) or not is_plain_file_name(path.name):
            return None
        if not folder:
            return cls(folder, path.name) if path.name == LOOSE_STEM else None
        return cls(folder, path.name) if FOLDERS.fullmatch(folder) else None

    @classmethod
    def of_unit(cls, unit: UnitSpec) -> SetName:
        return cls(f"graphs/{unit.name}", UNIT_STEM)

    @property
    def key(self) -> str:
        return f"{self.folder}/{self.stem}" if self.folder else self.stem

    @property
    def rank(self) -> tuple[int, str]:
        """Sorts sets by when a new machine needs them."""
        return ORDER.index(self.folder.partition("/")[0]), self.key

    def manifest_key(self, digest: str) -> str:
        """By its content, so that a set is replaced by writing its marker, and not in between."""
        return f"{self.key}.manifest-{digest[:ID_DIGITS]}.json"

    def on_disk(self, port: Path) -> CommittedSet:
        return CommittedSet(port / self.folder, self.stem)


class MirroredManifest(BaseModel):
    """A set's manifest in the bucket. `local`: the text of the manifest on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    generation: PositiveInt
    local: str

    def data(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @property
    def manifest(self) -> Manifest:
        """Raises ValidationError."""
        return Manifest.model_validate_json(self.local)


class MirroredMarker(BaseModel):
    """What makes a set count: the digest of its manifest object, and who said so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: PositiveInt
    manifest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

    def data(self) -> bytes:
        return (self.model_dump_json() + "\n").encode()


def read_set(store: Store, name: SetName) -> MirroredManifest:
    """A set's manifest in the bucket. What does not fit is read again: the set may be replaced meanwhile, or a byte
    have been altered on the way. Raises IntegrityError when marker and manifest do not belong together."""
    for left in reversed(range(READS)):
        try:
            return _read_once(store, name)
        except IntegrityError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _read_once(store: Store, name: SetName) -> MirroredManifest:
    where = f"{store.location}/{name.key}"
    marker = store.read(name.key + MARKER_SUFFIX)
    if marker is None:
        raise IntegrityError(f"{where} has no marker.", PUSH_AGAIN)
    try:
        digest = MirroredMarker.model_validate_json(marker.data).manifest
    except ValidationError as error:
        raise _unreadable(where, "marker", error) from error
    keys = name.manifest_key(digest), name.key + OLD_MANIFEST_SUFFIX
    found = next(filter(None, map(store.read, keys)), None)
    if found is None:
        raise IntegrityError(f"{where} has no manifest.", PUSH_AGAIN)
    if digest_bytes(found.data) != digest:
        raise IntegrityError(
            f"{where}: its manifest does not have the digest its marker names.", PUSH_AGAIN
        )
    try:
        manifest = MirroredManifest.model_validate_json(found.data)
        manifest.manifest  # noqa: B018  # it raises when it is none
    except ValidationError as error:
        raise _unreadable(where, "manifest", error) from error
    return manifest


def _unreadable(where: str, what: str, error: ValidationError) -> IntegrityError:
    return IntegrityError(
        f"{where}: its {what} is unreadable: {error.errors()[0]['msg']}.", PUSH_AGAIN
    )


def sets_on_disk(port: Port) -> Iterator[SetName]:
    """The committed sets of a port's folder, in the order a new machine needs them."""
    folders = ["source", "weights", *_graph_folders(port.path), "golden"]
    for folder in folders:
        for marker in sorted((port.path / folder).glob(f"*{MARKER_SUFFIX}")):
            name = SetName.of_marker(f"{folder}/{marker.name}")
            if name is not None:
                yield name


def _graph_folders(port: Path) -> list[str]:
    graphs = port / "graphs"
    return [f"graphs/{path.name}" for path in sorted(graphs.iterdir())] if graphs.is_dir() else []
