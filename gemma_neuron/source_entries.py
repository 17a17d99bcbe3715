"""`source.json`: the weights files a port was cut from, read strictly: it may come from a bucket or an editor.

In: a port. Out: `SourceEntry`s, or None where it has no record. Raises IntegrityError for a record of another shape.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gemma_neuron.artifacts import PlainName, json_bytes
from gemma_neuron.errors import IntegrityError
from gemma_neuron.port import Port

SOURCE_RECORD = "source.json"
TENSOR_DIGESTS = "tensors"
FILE_HEADER, FILE_TENSORS = "header", "names"
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SourceEntry(BaseModel):
    """One file. Times are those it had when it was last looked at; `blake3` is None until it was read whole.

    `tensors`: our name of a tensor → blake3 of its bytes. Of a file whose every tensor is used, instead: its JSON
    `header`, and our `names` of the tensors in the file's order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: PlainName
    bytes: NonNegativeInt
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    seen_at: str = ""
    blake3: Digest | None = None
    tensors: dict[str, Digest] | None = None
    header: str | None = None
    names: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> SourceEntry:
        if (self.header is None) != (self.names is None):
            raise ValueError("header and names belong together")
        if self.blake3 is None and (self.header is not None or self.tensors is not None):
            raise ValueError("digests of tensors without the file's own")
        return self

    @property
    def stamp(self) -> tuple[int | None, ...]:
        """What differs when the file may have other bytes than when it was last looked at."""
        return self.bytes, self.mtime_ns, self.ctime_ns

    def to_json(self, without: Collection[str] = ()) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude=set(without))


OF_ONE_MACHINE = ("mtime_ns", "ctime_ns", "seen_at")
"""What is said of a file on the machine that read it: no other's business, and not to be believed from another."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[SourceEntry, ...]

    @model_validator(mode="after")
    def _names_each_once(self) -> _Record:
        names = [entry.name for entry in self.files]
        if len(set(names)) < len(names):
            raise ValueError("a file stands there twice")
        return self


def shared(data: bytes) -> bytes:
    """A `source.json` without what is of one machine alone; of such a one, the same bytes. Raises IntegrityError."""
    return json_bytes(
        {"files": [entry.to_json(without=OF_ONE_MACHINE) for entry in entries_of(data)]}
    )


def entries_of(data: bytes) -> tuple[SourceEntry, ...]:
    """The entries of a `source.json` that another machine wrote. Raises IntegrityError."""
    try:
        return _Record.model_validate_json(data).files
    except ValidationError as error:
        raise IntegrityError(
            f"{SOURCE_RECORD} is no record of weights files: {error.errors()[0]['msg']}.",
            "Compile the port again on a machine that has the checkpoint, and push it from there.",
        ) from error


def source_entries(port: Port) -> tuple[SourceEntry, ...] | None:
    """The entries of the port's `source.json`, None without one. Raises IntegrityError."""
    path = port.path / SOURCE_RECORD
    hint = (
        f"Remove {path} and run the same `shard` or `compile` again: the ranks are then compared with the checkpoint "
        "and the record is made anew."
    )
    try:
        found = port.read_json(SOURCE_RECORD)
        return None if found is None else _Record.model_validate(found).files
    except IntegrityError as error:
        raise IntegrityError(error.message, hint) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise IntegrityError(
            f"{path} is no record of weights files: {error.error_count()} problems, first {where}: {first['msg']}.",
            hint,
        ) from error
